"""The profiler: programs in, labels out.

Read :mod:`~cdmpp.profiler.session` (a run: networks to a dataset), :mod:`~cdmpp.profiler.plan` (what to measure next),
:mod:`~cdmpp.profiler.engine` (builders and measuring kept busy), :mod:`~cdmpp.profiler.cpu` and :mod:`cdmpp.profiler.gpu` (how a
label is made), :mod:`~cdmpp.profiler.statistics` (from samples to a label) and :mod:`~cdmpp.profiler.calibration` (how many at a
time). :mod:`~cdmpp.profiler.rates` measures the machine itself.
"""
