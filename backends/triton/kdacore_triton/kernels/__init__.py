"""Device code. Nothing here is imported before a call runs on this backend.

Names of parameters, the same in every kernel:

- Arrays have the names of the public functions (``q``, ``A_log``, ``cu_seqlens``, ``state_indices``) or of the
  equations (``kg``, ``Aqk``); the gradient of ``x`` is ``dx``. Arrays and strides that belong together are one group, a
  NamedTuple of :mod:`.groups`; an absent array is None. States are ``source`` where they are read and ``target`` where
  they are written, if both may be pools, else ``initial_state`` and ``final_state``.
- Numbers: ``T`` tokens, ``NT`` chunks and ``NS`` segments of a sequence that is not packed, ``N`` sequences, ``H`` and
  ``HV`` heads of q and v, ``scale``, ``lower_bound``. Sizes that change from call to call, and arrays of which single
  numbers are read, are no members of groups: Triton compiles anew for a member that becomes 1 or divisible by 16, and
  for the alignment of an array, whatever ``do_not_specialize`` says of the group.
- Constants of the compiled kernel, in capitals and passed by name: ``K``, ``V`` head dims, ``KP``, ``VP`` the same
  padded to a power of two, ``BK``, ``BV`` the part of them taken at a time, ``C`` rows of a chunk, ``POOL`` strides
  over K and V. ``GATE``, ``FAMILY``, ``BETA``, ``READ`` and ``WRITE`` take the named constants of :mod:`.common` and
  :mod:`.recurrent`. ``L2NORM``, ``PACKED``, ``SCALAR_GATE`` and ``V_FIRST`` are flags of the call, ``DOT`` and
  ``INV_DOT`` the precisions of products, and ``ASM`` allows PTX.
"""
