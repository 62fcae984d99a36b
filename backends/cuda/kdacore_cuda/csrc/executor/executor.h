/* The executor: makes the launches of programs (kdacore_cuda/runtime/program.py writes and describes them). */

#ifndef KDACORE_EXECUTOR_H
#define KDACORE_EXECUTOR_H

#include <stddef.h>
#include <stdint.h>

enum {
  FORMAT = 3,          /* of programs; program.FORMAT */
  HEADER = 8,          /* words before a program's own numbers, behind which its steps begin */
  ARGUMENTS = 3,       /* places in the header: how many arrays a call is given, */
  RESULTS = 4,         /* how many more it writes, */
  NUMBERS = 5,         /* how many numbers its launches take, */
  OWN_NUMBERS = 6,     /* how many of those, all or none, the program has itself, */
  STEPS = 7,           /* and how many steps it has */
  MOST_VALUES = 512,   /* of one call */
};

/* Why a call was not made. */
typedef struct {
  enum { INVALID, DEVICE, DRIVER } kind; /* the program is wrong; it is for another device; the driver refused */
  int status;                            /* the driver's, or 0 */
  const char* call;                      /* what the driver refused, or NULL */
  char text[480];
} Failure;

typedef struct {
  const int64_t* words;
  int64_t count;
} Program;

/* Whether the words are a program of this format. */
int kdacore_is_program(const Program* program, Failure* failure);

/* Make all launches of a program on a stream of the current context. values[0] is replaced by the launch number; behind
 * it are the addresses of the arrays, then the numbers, which are replaced by the program's own if it has any. Returns
 * 0, or 1 and the failure. */
int kdacore_execute(const Program* program, int64_t* values, void* stream, Failure* failure);

/* Make the stream's context current; what kdacore_leave needs. */
int kdacore_enter(void* stream, void** entered, Failure* failure);
void kdacore_leave(void* entered);

#endif
