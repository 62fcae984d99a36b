"""One call described as data, and the arrays made from the description."""
