"""Recording steps, and explaining them.

trace      the command `ubatch trace`
steps      the steps of a trace, over all ranks
diagnosis  rules that find why steps were slow or not overlapped
offline    runs that the command starts, and what it chooses for them
inside     rules on the time inside overlapped steps, and what a rule finds
experts    the load of experts, and its picture
text       a step as text
"""
