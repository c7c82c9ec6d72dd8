"""What everything stands on: errors, dtypes, meshes, layouts, redistribution, ambient settings."""
