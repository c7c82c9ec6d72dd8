"""Schedule IR: steps and buffers, pipelines, algorithms of collectives."""
