"""Triton kernels of the models and of steps. Importing a module of this package imports Triton; this does not.

norm          RMS norms, with the addition before them
rope          rotation of heads, with their norms
activation    SiLU times the other half
place         a lane's inputs, to where a captured graph reads them
resolve       pending tokens, stored and found on the device
"""
