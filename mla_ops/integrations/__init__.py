"""Where this package meets others."""
