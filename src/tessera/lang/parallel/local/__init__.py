"""The local view: function bodies that get one device's blocks."""
