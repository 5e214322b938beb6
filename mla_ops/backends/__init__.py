"""Backends of the ops: one meaning, several implementations."""
