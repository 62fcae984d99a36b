"""The oracle: what every op computes, in float64 NumPy. Every backend is compared with it.

``recurrence`` has the ops that take whole sequences, with their gradients, ``gate`` the gate, ``stages`` the stage ops.
Each function takes the :class:`~kdacore.types.Request` of a call and its inputs, arrays of any kind, and returns
float64 NumPy arrays; :func:`kdacore.oracle.host_values.to_float64` makes such an array of a result to compare.
"""
