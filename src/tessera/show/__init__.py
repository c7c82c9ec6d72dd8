"""Pictures of meshes, layouts, pipelines and curves, from values that other modules compute."""
