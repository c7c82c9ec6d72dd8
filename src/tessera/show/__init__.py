"""Pictures: meshes, layouts, curves. They show what other modules computed and compute nothing."""
