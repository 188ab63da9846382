"""The numbers by which Horovod names the ways to combine tensors."""

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5
