"""What a call may change besides its result, and the way back.

state         a snapshot: one comparison, and one way back
walk          finds everything that a module or a call's arguments consist of
stores        what the code of a module may leave on shared objects between two points
random_state  the states of the random generators
"""
