"""Recordings of functions: `recorder`, the boxes and containers that they read and write, and moves
between meshes."""
