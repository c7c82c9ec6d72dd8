"""Training steps and stages, schedule options, debugging, and ops of a user's own."""
