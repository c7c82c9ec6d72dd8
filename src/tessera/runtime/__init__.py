"""The engine: the only code that imports JAX. Devices, arrays, lowering, execution."""
