"""Record a forward pass: operators, and the tensors between them."""
