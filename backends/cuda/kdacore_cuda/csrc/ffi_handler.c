/* The XLA FFI handler of the cuda backend: makes the launches of one call on XLA's stream.
 *
 * A call's launches come as one attribute, "program": an array of 64-bit words that
 * kdacore_cuda/launch_program.py writes and describes. Nothing here knows an op. Kernels are named
 * by the first 64 bits of the sha256 of their cubin: Python adds those it used while tracing
 * (kdacore_ffi_add_kernel); others are read from the folder of packaged cubins, whose files have
 * these names, so that a program exported elsewhere runs too.
 *
 * Plain C against xla/ffi/api/c_api.h, which jaxlib ships. The driver's functions are looked up in
 * the driver that the process has, so that the library itself loads anywhere. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

enum {
  API_MAJOR = 0, /* of XLA's FFI, that this is written for */
  API_MINOR = 3,
  FORMAT = 2,         /* of the program; launch_program.FORMAT */
  KERNEL = 1,         /* kinds of steps */
  CLEAR = 2,
  COPY = 3,
  HEADER = 6,         /* words before the first step */
  KERNEL_HEADER = 13, /* words of a kernel step before its places */
  CLEAR_WORDS = 5,
  COPY_WORDS = 5,
  ENTRY_BYTES = 32,
  PARAM_BYTES = 1024,
  DEVICES = 64,
  TABLE = 1024, /* of kernels; a power of two */
  STATIC_SHARED = 48 * 1024,
};
static const int64_t MAGIC = 0x6b6461636f7265; /* "kdacore" */
static const uint32_t LAUNCH_NUMBER = 0xffffffff; /* in the place of a buffer */

/* --- the driver, as far as it is needed ------------------------------------------------------ */

typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned attribute_count;
} LaunchConfig;

typedef struct {
  int id;
  char pad[4];
  int value;
  char rest[60];
} LaunchAttribute;

enum {
  MULTIPROCESSORS = 16,            /* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT */
  CAPABILITY_MAJOR = 75,           /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR */
  CAPABILITY_MINOR = 76,
  MAX_DYNAMIC_SHARED = 8,          /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
  PROGRAMMATIC_SERIALIZATION = 6,  /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */
  RELAXED = 2,                     /* CU_STREAM_CAPTURE_MODE_RELAXED */
};

static struct {
  int (*cuCtxGetCurrent)(void**);
  int (*cuCtxGetDevice)(int*);
  int (*cuCtxPushCurrent_v2)(void*);
  int (*cuCtxPopCurrent_v2)(void**);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuGetErrorName)(int, const char**);
  int (*cuKernelSetAttribute)(int, int, void*, int);
  int (*cuLaunchKernelEx)(const LaunchConfig*, void*, void**, void**);
  int (*cuLibraryGetKernel)(void**, void*, const char*);
  int (*cuLibraryLoadData)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
  int (*cuMemcpyDtoDAsync_v2)(void*, const void*, size_t, void*);
  int (*cuMemsetD8Async)(void*, unsigned char, size_t, void*);
  int (*cuStreamGetCtx)(void*, void**);
  int (*cuThreadExchangeStreamCaptureMode)(int*);
} driver;

#define DRIVER_FUNCTION(name) {#name, (void**)&driver.name}
static const struct {
  const char* name;
  void** at;
} driver_functions[] = {
    DRIVER_FUNCTION(cuCtxGetCurrent),      DRIVER_FUNCTION(cuCtxGetDevice),
    DRIVER_FUNCTION(cuCtxPushCurrent_v2),  DRIVER_FUNCTION(cuCtxPopCurrent_v2),
    DRIVER_FUNCTION(cuDeviceGetAttribute), DRIVER_FUNCTION(cuGetErrorName),
    DRIVER_FUNCTION(cuKernelSetAttribute), DRIVER_FUNCTION(cuLaunchKernelEx),
    DRIVER_FUNCTION(cuLibraryGetKernel),   DRIVER_FUNCTION(cuLibraryLoadData),
    DRIVER_FUNCTION(cuMemcpyDtoDAsync_v2), DRIVER_FUNCTION(cuMemsetD8Async),
    DRIVER_FUNCTION(cuStreamGetCtx),       DRIVER_FUNCTION(cuThreadExchangeStreamCaptureMode),
};

/* --- state of the process -------------------------------------------------------------------- */

typedef struct {
  uint64_t id; /* 0: no kernel here */
  void* cubin;
  void* handle;         /* CUkernel, valid on every device; NULL until it is first launched */
  int shared[DEVICES];  /* the limit that has been set, beyond STATIC_SHARED */
} Kernel;

typedef struct {
  int known, capability, multiprocessors;
} Device;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Kernel kernels[TABLE];
static int kernel_count;
static Device devices[DEVICES];
static char cubin_folder[4096];
static int64_t next_number;

/* Look up the driver's functions. `numbers`: the first launch number. Returns NULL, or what is
 * wrong. */
const char* kdacore_ffi_open(const char* library, const char* folder, int64_t numbers) {
  static char problem[512];
  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!loaded) {
    snprintf(problem, sizeof problem, "%s", dlerror());
    return problem;
  }
  for (size_t i = 0; i < sizeof driver_functions / sizeof *driver_functions; ++i) {
    *driver_functions[i].at = dlsym(loaded, driver_functions[i].name);
    if (!*driver_functions[i].at) {
      snprintf(problem, sizeof problem, "%s has no %s", library, driver_functions[i].name);
      return problem;
    }
  }
  if (strlen(folder) >= sizeof cubin_folder) return "the path of the packaged cubins is too long";
  strcpy(cubin_folder, folder);
  __atomic_store_n(&next_number, numbers, __ATOMIC_RELAXED);
  return NULL;
}

static Kernel* find(uint64_t id) { /* under the lock; NULL: the table is full */
  for (uint64_t i = id, tried = 0; tried < TABLE; ++i, ++tried) {
    Kernel* kernel = &kernels[i % TABLE];
    if (kernel->id == id) return kernel;
    if (!kernel->id) {
      if (kernel_count >= TABLE / 2) return NULL;
      ++kernel_count;
      kernel->id = id;
      return kernel;
    }
  }
  return NULL;
}

/* Keep a copy of a cubin. Returns 0, or 1 where there is no room. */
int kdacore_ffi_add_kernel(uint64_t id, const void* cubin, size_t size) {
  int failed = 1;
  pthread_mutex_lock(&lock);
  Kernel* kernel = find(id);
  if (kernel && !kernel->cubin) {
    kernel->cubin = malloc(size);
    if (kernel->cubin) memcpy(kernel->cubin, cubin, size);
  }
  failed = !kernel || !kernel->cubin;
  pthread_mutex_unlock(&lock);
  return failed;
}

static void* read_packaged(uint64_t id) {
  char path[sizeof cubin_folder + 32];
  snprintf(path, sizeof path, "%s/%016llx.cubin", cubin_folder, (unsigned long long)id);
  FILE* file = fopen(path, "rb");
  if (!file) return NULL;
  void* text = NULL;
  long size = fseek(file, 0, SEEK_END) ? -1 : ftell(file);
  if (size > 0 && !fseek(file, 0, SEEK_SET)) text = malloc((size_t)size);
  if (text && fread(text, 1, (size_t)size, file) != (size_t)size) {
    free(text);
    text = NULL;
  }
  fclose(file);
  return text;
}

/* --- errors ---------------------------------------------------------------------------------- */

static XLA_FFI_Error* fail(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* text) {
  XLA_FFI_Error_Create_Args args;
  memset(&args, 0, sizeof args);
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = text;
  args.errc = code;
  return frame->api->XLA_FFI_Error_Create(&args);
}

static XLA_FFI_Error* refused(const XLA_FFI_CallFrame* frame, const char* call, int status) {
  const char* name = NULL;
  char text[256];
  driver.cuGetErrorName(status, &name);
  snprintf(text, sizeof text, "kdacore_cuda: %s failed: %s (%d)", call, name ? name : "unknown error", status);
  return fail(frame, XLA_FFI_Error_Code_INTERNAL, text);
}

static XLA_FFI_Error* malformed(const XLA_FFI_CallFrame* frame, const char* what) {
  char text[256];
  snprintf(text, sizeof text,
           "kdacore_cuda: the call was compiled by another version of kdacore, or is damaged: %s", what);
  return fail(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, text);
}

/* --- one call -------------------------------------------------------------------------------- */

typedef struct {
  const int64_t* words;
  int64_t count;
} Program;

static XLA_FFI_Error* get_program(const XLA_FFI_CallFrame* frame, Program* program) {
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
    const int64_t* w = program->words;
    if (program->count < HEADER || w[0] != (MAGIC << 8 | FORMAT)) return malformed(frame, "its format");
    if (w[3] != frame->args.size || w[4] != frame->rets.size) return malformed(frame, "its arrays");
    return NULL;
  }
  return malformed(frame, "it has no program");
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

/* Whether the current device is one that the program was planned for. */
static XLA_FFI_Error* check_device(const XLA_FFI_CallFrame* frame, const Program* program, int index) {
  if (index < 0 || index >= DEVICES) {
    return fail(frame, XLA_FFI_Error_Code_UNIMPLEMENTED, "kdacore_cuda: more than 64 GPUs in one process");
  }
  Device* device = &devices[index];
  if (!device->known) {
    int major = 0, minor = 0, status = driver.cuDeviceGetAttribute(&major, CAPABILITY_MAJOR, index);
    if (!status) status = driver.cuDeviceGetAttribute(&minor, CAPABILITY_MINOR, index);
    if (!status) status = driver.cuDeviceGetAttribute(&device->multiprocessors, MULTIPROCESSORS, index);
    if (status) return refused(frame, "cuDeviceGetAttribute", status);
    device->capability = 10 * major + minor;
    device->known = 1;
  }
  if (device->capability == program->words[1] && device->multiprocessors == program->words[2]) return NULL;
  char text[256];
  snprintf(text, sizeof text,
           "kdacore_cuda: compiled for sm_%d with %d multiprocessors, but GPU %d is sm_%d with %d", (int)program->words[1],
           (int)program->words[2], index, device->capability, device->multiprocessors);
  return fail(frame, XLA_FFI_Error_Code_FAILED_PRECONDITION, text);
}

static XLA_FFI_Error* load(const XLA_FFI_CallFrame* frame, Kernel* kernel, const char* entry) {
  if (!kernel->cubin) kernel->cubin = read_packaged(kernel->id);
  if (!kernel->cubin) {
    char text[256];
    snprintf(text, sizeof text,
             "kdacore_cuda: no machine code %016llx of the kernel %s: the call was compiled by another "
             "version of kdacore",
             (unsigned long long)kernel->id, entry);
    return fail(frame, XLA_FFI_Error_Code_NOT_FOUND, text);
  }
  void *library = NULL, *handle = NULL;
  int status = driver.cuLibraryLoadData(&library, kernel->cubin, NULL, NULL, 0, NULL, NULL, 0);
  if (status) return refused(frame, "cuLibraryLoadData", status);
  status = driver.cuLibraryGetKernel(&handle, library, entry);
  if (status) return refused(frame, "cuLibraryGetKernel", status);
  kernel->handle = handle;
  return NULL;
}

/* The handle of a kernel that may use `shared` bytes on the current device. */
static XLA_FFI_Error* prepare(const XLA_FFI_CallFrame* frame, const int64_t* step, int device, void** handle) {
  XLA_FFI_Error* error = NULL;
  char entry[ENTRY_BYTES + 1] = {0};
  int shared = (int)step[9], status = 0, mode = RELAXED;
  pthread_mutex_lock(&lock);
  Kernel* kernel = find((uint64_t)step[2]);
  if (!kernel) {
    error = fail(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "kdacore_cuda: too many kernels in one process");
  } else if (!kernel->handle || (shared > STATIC_SHARED && shared > kernel->shared[device])) {
    memcpy(entry, step + 3, ENTRY_BYTES);
    driver.cuThreadExchangeStreamCaptureMode(&mode); /* the stream may be recording */
    if (!kernel->handle) error = load(frame, kernel, entry);
    if (!error && shared > STATIC_SHARED && shared > kernel->shared[device]) {
      status = driver.cuKernelSetAttribute(MAX_DYNAMIC_SHARED, shared, kernel->handle, device);
      if (status) error = refused(frame, "cuKernelSetAttribute", status);
      else kernel->shared[device] = shared;
    }
    driver.cuThreadExchangeStreamCaptureMode(&mode);
  }
  if (!error) *handle = kernel->handle;
  pthread_mutex_unlock(&lock);
  return error;
}

static XLA_FFI_Error* address_of(const XLA_FFI_CallFrame* frame, int64_t buffer, uint64_t* address) {
  int64_t args = frame->args.size;
  if (buffer < 0 || buffer >= args + frame->rets.size) return malformed(frame, "an array's number");
  const XLA_FFI_Buffer* found = buffer < args ? frame->args.args[buffer] : frame->rets.rets[buffer - args];
  *address = (uint64_t)(uintptr_t)found->data;
  return NULL;
}

static XLA_FFI_Error* launch(const XLA_FFI_CallFrame* frame, const int64_t* step, int64_t words, int device,
                             void* stream, int64_t number) {
  uint64_t params[PARAM_BYTES / 8];
  int64_t bytes = words < KERNEL_HEADER ? -1 : step[11], places = bytes < 0 ? -1 : step[12];
  if (bytes < 0 || bytes > PARAM_BYTES || bytes % 8 || places < 0 || places > PARAM_BYTES / 8 ||
      words != KERNEL_HEADER + 2 * places + bytes / 8) {
    return malformed(frame, "the length of a launch");
  }
  memcpy(params, step + KERNEL_HEADER + 2 * places, (size_t)bytes);
  for (int64_t i = 0; i < places; ++i) {
    const int64_t* place = step + KERNEL_HEADER + 2 * i;
    uint32_t at = (uint32_t)place[0], buffer = (uint32_t)((uint64_t)place[0] >> 32);
    uint64_t value = (uint64_t)number;
    if (at % 8 || at >= bytes) return malformed(frame, "the place of a parameter");
    if (buffer != LAUNCH_NUMBER) {
      XLA_FFI_Error* error = address_of(frame, buffer, &value);
      if (error) return error;
      value += (uint64_t)place[1];
    }
    params[at / 8] = value;
  }
  void *handle = NULL, *arguments[1] = {params};
  XLA_FFI_Error* error = prepare(frame, step, device, &handle);
  if (error) return error;
  LaunchAttribute overlap = {.id = PROGRAMMATIC_SERIALIZATION, .value = 1};
  LaunchConfig config = {
      .grid = {(unsigned)step[7], 1, 1},
      .block = {(unsigned)step[8], 1, 1},
      .shared = (unsigned)step[9],
      .stream = stream,
      .attributes = &overlap,
      .attribute_count = step[10] ? 1 : 0,
  };
  int status = driver.cuLaunchKernelEx(&config, handle, arguments, NULL);
  return status ? refused(frame, "cuLaunchKernelEx", status) : NULL;
}

static XLA_FFI_Error* clear(const XLA_FFI_CallFrame* frame, const int64_t* step, int64_t words, void* stream) {
  uint64_t address = 0;
  if (words != CLEAR_WORDS) return malformed(frame, "the length of a step");
  XLA_FFI_Error* error = address_of(frame, step[2], &address);
  if (error || !step[4]) return error;
  int status = driver.cuMemsetD8Async((void*)(uintptr_t)(address + (uint64_t)step[3]), 0, (size_t)step[4], stream);
  return status ? refused(frame, "cuMemsetD8Async", status) : NULL;
}

/* An argument to a result that should be the same memory, where XLA has given it other memory. */
static XLA_FFI_Error* copy(const XLA_FFI_CallFrame* frame, const int64_t* step, int64_t words, void* stream) {
  uint64_t from = 0, to = 0;
  if (words != COPY_WORDS) return malformed(frame, "the length of a step");
  XLA_FFI_Error* error = address_of(frame, step[2], &from);
  if (!error) error = address_of(frame, step[3], &to);
  if (error || from == to || !step[4]) return error;
  int status = driver.cuMemcpyDtoDAsync_v2((void*)(uintptr_t)to, (const void*)(uintptr_t)from, (size_t)step[4], stream);
  return status ? refused(frame, "cuMemcpyDtoDAsync", status) : NULL;
}

static XLA_FFI_Error* run_here(const XLA_FFI_CallFrame* frame, const Program* program, void* stream) {
  int device = 0, status = driver.cuCtxGetDevice(&device);
  if (status) return refused(frame, "cuCtxGetDevice", status);
  XLA_FFI_Error* error = check_device(frame, program, device);
  int64_t number = __atomic_fetch_add(&next_number, 1, __ATOMIC_RELAXED);
  int64_t at = HEADER;
  for (int64_t i = 0; !error && i < program->words[5]; ++i) {
    const int64_t* step = program->words + at;
    int64_t words = at + 2 <= program->count ? step[1] : -1;
    if (words < 2 || words > program->count - at) return malformed(frame, "the length of a step");
    if (step[0] == KERNEL) error = launch(frame, step, words, device, stream, number);
    else if (step[0] == CLEAR) error = clear(frame, step, words, stream);
    else if (step[0] == COPY) error = copy(frame, step, words, stream);
    else error = malformed(frame, "an unknown step");
    at += words;
  }
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
  Program program;
  void *stream = NULL, *context = NULL, *current = NULL;
  XLA_FFI_Error* error = get_program(frame, &program);
  if (!error && !driver.cuLaunchKernelEx) {
    error = fail(frame, XLA_FFI_Error_Code_FAILED_PRECONDITION, "kdacore_cuda: the driver was not opened");
  }
  if (!error && has_stream) error = get_stream(frame, &stream);
  if (error) return error;
  if (has_stream) {
    int status = driver.cuStreamGetCtx(stream, &context);
    if (status) return refused(frame, "cuStreamGetCtx", status);
    driver.cuCtxGetCurrent(&current);
    if (context != current) {
      status = driver.cuCtxPushCurrent_v2(context);
      if (status) return refused(frame, "cuCtxPushCurrent", status);
    }
  }
  error = run_here(frame, &program, stream);
  if (context != current) driver.cuCtxPopCurrent_v2(&current);
  return error;
}

/* The handler. */
XLA_FFI_Error* kdacore_ffi_execute(XLA_FFI_CallFrame* frame) { return run(frame, 1); }

/* For tests on the CPU, where XLA has no stream. */
XLA_FFI_Error* kdacore_ffi_execute_without_stream(XLA_FFI_CallFrame* frame) { return run(frame, 0); }
