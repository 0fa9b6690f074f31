"""What runs inside a kernel, written once for the GPU, the emulation on the CPU, and the checker.

A kernel is a plain Python function over the primitives of :mod:`shmemar.device.memory` and
:mod:`shmemar.device.words`. Called as it is, a primitive asks the machine of
:mod:`shmemar.device.interpreter`; :mod:`shmemar.device.ptx` gives it a meaning in numba-cuda and
:mod:`shmemar.device.native` one in numba's njit. Nothing here imports numba until one of those two
is installed.
"""
