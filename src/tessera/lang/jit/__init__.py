"""Compiled functions: `jit`, one recorded `call`, its `outputs`, and the `guards` under which it
stands for another call."""
