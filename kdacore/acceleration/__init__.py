"""What only makes calls faster: calls like earlier ones are recognised, and skip validation and selection.

``kdacore/dispatch/recognition.py`` is the only module that imports anything from this folder. Without the folder every
call is planned the ordinary way and gives the same results; tests/packaging/test_without_acceleration.py runs such a
copy.
"""
