"""The profiler measures programs and gives their labels. ``session`` is a run, from networks to a dataset; ``plan`` chooses
what to measure next; ``engine`` keeps builders and measuring processes busy; ``cpu`` and ``gpu`` make labels by ``statistics``,
as many at a time as ``calibration`` finds. ``rates`` measures the machine itself."""
