"""Pure functions of tensors, one folder an operation, a definition in each."""
