"""Programs of other libraries, played on tensors: their calls, and the rules for them."""
