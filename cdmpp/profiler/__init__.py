"""The profiler: programs in, labels out. ``session`` is a run (networks to a dataset), ``plan`` what to measure next;
``engine`` keeps builders and measuring processes busy; ``cpu`` and ``gpu`` make labels by ``statistics``, as many at a time as
``calibration`` finds. ``rates`` measures the machine itself."""
