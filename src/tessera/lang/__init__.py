"""The language: tensors, functions, gradients, loops and strategies, as users write them.

Read in this order, each room uses those before it: `value` (tensors and host data), `record`
(recordings, boxes, trees), `math` (functions of tensors), `autodiff` (gradients and loops), `jit`
(compiled functions), `parallel` (strategies, collectives, local bodies, pipelines), `program`
(training steps, stages, options of the schedule).
"""

# These modules install methods on Tensor when they are imported.
from .autodiff import numpy_functions as numpy_functions
from .autodiff import other_libraries as other_libraries
from .autodiff import tape as tape
from .math import operators as operators
from .value import values_text as values_text
