/* The XLA FFI handler of the cuda backend: a call's program comes as the attribute "program", its arrays in the frame;
 * the executor makes its launches on XLA's stream. Plain C against xla/ffi/api/c_api.h, which jaxlib ships. */

#include <stdio.h>
#include <string.h>

#include "executor.h"
#include "xla/ffi/api/c_api.h"

enum {
  API_MAJOR = 0, /* of XLA's FFI, that this is written for */
  API_MINOR = 3,
};

static XLA_FFI_Error* fail(const XLA_FFI_CallFrame* frame, const Failure* failure) {
  static const XLA_FFI_Error_Code codes[] = {
      [INVALID] = XLA_FFI_Error_Code_INVALID_ARGUMENT,
      [DEVICE] = XLA_FFI_Error_Code_FAILED_PRECONDITION,
      [DRIVER] = XLA_FFI_Error_Code_INTERNAL,
  };
  char text[sizeof failure->text + 64];
  if (failure->call) {
    snprintf(text, sizeof text, "kdacore_cuda: %s failed: %s (%d)", failure->call, failure->text, failure->status);
  } else {
    snprintf(text, sizeof text, "kdacore_cuda: %s", failure->text);
  }
  XLA_FFI_Error_Create_Args args;
  memset(&args, 0, sizeof args);
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = text;
  args.errc = codes[failure->kind];
  return frame->api->XLA_FFI_Error_Create(&args);
}

static int no_program(Failure* failure, const char* why) {
  memset(failure, 0, sizeof *failure);
  failure->kind = INVALID;
  snprintf(failure->text, sizeof failure->text,
           "the call was compiled by another version of kdacore, or is damaged: %s", why);
  return 1;
}

static int get_program(const XLA_FFI_CallFrame* frame, Program* program, Failure* failure) {
  static const char name[] = "program";
  const XLA_FFI_Attrs* attrs = &frame->attrs;
  for (int64_t i = 0; i < attrs->size; ++i) {
    const XLA_FFI_ByteSpan* found = attrs->names[i];
    if (found->len != sizeof name - 1 || memcmp(found->ptr, name, sizeof name - 1)) continue;
    if (attrs->types[i] != XLA_FFI_AttrType_ARRAY) break;
    const XLA_FFI_Array* array = attrs->attrs[i];
    if (array->dtype != XLA_FFI_DataType_S64) break;
    program->words = array->data;
    program->count = (int64_t)array->size;
    if (kdacore_is_program(program, failure)) return 1;
    const int64_t* w = program->words;
    if (w[ARGUMENTS] != frame->args.size || w[RESULTS] != frame->rets.size) return no_program(failure, "its arrays");
    if (w[OWN_NUMBERS] != w[NUMBERS]) return no_program(failure, "its numbers");
    return 0;
  }
  return no_program(failure, "it has no program");
}

static XLA_FFI_Error* get_stream(const XLA_FFI_CallFrame* frame, void** stream) {
  XLA_FFI_Stream_Get_Args args;
  memset(&args, 0, sizeof args);
  args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
  args.ctx = frame->ctx;
  XLA_FFI_Error* error = frame->api->XLA_FFI_Stream_Get(&args);
  *stream = args.stream;
  return error;
}

/* XLA asks what the handler was written for: an extension of a frame that is no call. */
static int answer_metadata(XLA_FFI_CallFrame* frame) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
  /* The structs used here are the same in every minor version, but XLA takes only handlers that name
   * one it knows: its own. Of another major version nothing is known; XLA then refuses this one. */
  int known = frame->api && frame->api->api_version.major_version == API_MAJOR;
  metadata->api_version.major_version = API_MAJOR;
  metadata->api_version.minor_version = known ? frame->api->api_version.minor_version : API_MINOR;
  metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
  return 1;
}

static XLA_FFI_Error* run(XLA_FFI_CallFrame* frame, int has_stream) {
  if (answer_metadata(frame)) return NULL;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  Failure failure;
  Program program;
  void *stream = NULL, *entered = NULL;
  if (get_program(frame, &program, &failure)) return fail(frame, &failure);
  if (has_stream) {
    XLA_FFI_Error* error = get_stream(frame, &stream);
    if (error) return error;
    if (kdacore_enter(stream, &entered, &failure)) return fail(frame, &failure);
  }
  int64_t values[MOST_VALUES], *next = values + 1;
  for (int64_t i = 0; i < frame->args.size; ++i) *next++ = (int64_t)(uintptr_t)((const XLA_FFI_Buffer*)frame->args.args[i])->data;
  for (int64_t i = 0; i < frame->rets.size; ++i) *next++ = (int64_t)(uintptr_t)((const XLA_FFI_Buffer*)frame->rets.rets[i])->data;
  int failed = kdacore_execute(&program, values, stream, &failure);
  kdacore_leave(entered);
  return failed ? fail(frame, &failure) : NULL;
}

/* The handler. */
XLA_FFI_Error* kdacore_ffi_execute(XLA_FFI_CallFrame* frame) { return run(frame, 1); }

/* For tests on the CPU, where XLA has no stream. */
XLA_FFI_Error* kdacore_ffi_execute_without_stream(XLA_FFI_CallFrame* frame) { return run(frame, 0); }
