"""Horovod's numbers for the ways to combine tensors."""

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5
