"""Base of all other packages: errors, dtypes, meshes, layouts, redistribution, ambient settings."""
