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
  padded to a power of two, ``BK``, ``BV`` the part of them taken at a time, ``BH`` value heads and ``BC`` columns
  taken at a time, ``C`` rows of a chunk, ``2^LEVELS`` of them where halves are merged, ``S`` rows of half a chunk,
  ``SIZE`` rows of a tile, ``SEGMENT`` tokens of a segment, ``EVERY`` tokens per checkpoint, ``GROUP`` value heads
  that share one of q, ``ROWS`` of a sum taken at a time or, in the chunk backward, values of a chunk in
  ``row_values``, ``WIDTH`` a width padded to a power of two, ``STAGES`` of a software pipeline, ``POOL`` strides over
  K and V. ``GATE``, ``FAMILY``, ``BETA``, ``READ`` and ``WRITE`` take the named constants of :mod:`.common` and
  :mod:`.recurrent`. ``L2NORM``, ``PACKED``, ``SCALAR_GATE`` and ``V_FIRST`` are flags of the call, ``DOT``,
  ``INV_DOT`` and ``FULL`` the precisions of products, and ``ASM`` allows PTX. ``MASKED``: rows may be past the end;
  ``MAYBE_NONE``: a row may be absent.
"""
