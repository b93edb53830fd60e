"""What a server can ask clients after training, and how it reaches them.

A question is a frozen dataclass: what is sent, the pure function that answers it from a client's
own rows, and the check of what came back. `InProcess` here and `fedup.flower.GridContact` ask the same ones.
"""
