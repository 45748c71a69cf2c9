"""Token log-probabilities and entropies over logits whose vocabulary is split over ranks (tensor parallelism)."""
