"""DeepSeek's multi-head latent attention (MLA) as well-behaved PyTorch custom ops."""
