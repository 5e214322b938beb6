"""Graph capture by batch size, proof of each graph, and a warm-up cache, for any module's step."""
