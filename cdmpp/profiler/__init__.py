"""The profiler: programs in, labels out.

``session`` is a run (networks to a dataset), ``plan`` what to measure next, ``engine`` keeps builders and measuring processes
supplied, ``cpu`` and ``gpu`` say how a label is made, ``statistics`` makes it of samples, ``calibration`` finds how many
programs may run at the same time. ``rates`` measures the machine itself.
"""
