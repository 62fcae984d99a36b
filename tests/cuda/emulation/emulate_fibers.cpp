#include "emulate_fibers.h"

#if defined(__x86_64__) && defined(__gnu_linux__)
asm(R"(
  .text
  .hidden emu_change_stacks
  .globl emu_change_stacks
  .type emu_change_stacks, @function
emu_change_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emu_change_stacks, . - emu_change_stacks
)");
#endif

namespace emu {

#if defined(__x86_64__) && defined(__gnu_linux__)
void begin(Context& context, unsigned char* stack, size_t bytes, void (*function)()) {
  u64* top = (u64*)(stack + bytes);
  *--top = 0;  // where `function` would return to: it begins as one that has been called
  *--top = (u64)function;
  for (int i = 0; i < 6; ++i) *--top = 0;
  context.stack = top;
}
#else
void begin(Context& context, unsigned char* stack, size_t bytes, void (*function)()) {
  getcontext(&context.start);
  context.start.uc_stack.ss_sp = stack;
  context.start.uc_stack.ss_size = bytes;
  makecontext(&context.start, function, 0);
  context.begins = true;
}
#endif

[[noreturn]] void fail(const char* what, u32 value, const Fiber* other) {
  char text[400];
  int length = snprintf(text, sizeof text, "%s (%x), block %d thread %d", what, value, me->block->index, me->thread);
  if (other) snprintf(text + length, sizeof text - length, "; written by block %d thread %d", other->block->index, other->thread);
  message = text + message;
  _longjmp(ending, 1);
}
void block_while(const u32* word, u32 mask, u32 value, const char* name, u32 at) {
  while ((*word & mask) == value) {
    me->wait_on = word;
    me->wait_mask = mask;
    me->wait_value = value;
    me->wait_name = name;
    me->wait_at = at;
    yield();
  }
  me->wait_on = nullptr;
}
void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) {
    if (to[i] < from[i]) to[i] = from[i];
  }
}
void release(Clock& to) {
  Warp& w = *me->warp;
  w.seen[w.id] = w.tick++;
  join(to, w.seen);
}
void acquire(const Clock& from) { join(me->warp->seen, from); }
void meet(Rendezvous& r, u32 count, const char* name, u32 at) {
  const u32 generation = r.generation;
  release(r.coming);
  if (++r.arrived == count) {
    r.arrived = 0;
    r.done = r.coming;
    ++r.generation;
  } else {
    block_while(&r.generation, ~0u, generation, name, at);
  }
  acquire(r.done);
  ++me->syncs;
}

}  // namespace emu
