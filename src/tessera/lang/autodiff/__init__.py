"""Gradients and loops: `grad`, `tape` for ops that run at once, `custom`, `forward`, `vmap`,
`scan`."""
