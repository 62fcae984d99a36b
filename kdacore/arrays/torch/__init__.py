"""The torch adapter. Imported only once the caller's own tensors have brought torch in."""
