"""What runs when: steps, pipelines, algorithms of collectives."""
