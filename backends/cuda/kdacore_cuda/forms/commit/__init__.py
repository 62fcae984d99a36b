"""``commit_records``: states in one launch, convolution windows in another."""
