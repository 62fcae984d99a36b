/* Makes the launches of one call. Eager calls, compiled graphs and XLA's programs all go through kdacore_execute.
 *
 * Nothing here knows an op. A call is a program, an array of 64-bit words, and its values: addresses of arrays and
 * numbers. Kernels are named by the first 64 bits of the sha256 of their cubin: Python adds those that it used
 * (kdacore_add_kernel); others are read from the folder of packaged cubins, whose files have these names, so that a
 * program exported elsewhere runs too.
 *
 * The driver's functions are looked up in the driver that the process has, so that the library itself loads anywhere.
 * Python's twin, which writes the same bytes, is kdacore_cuda/runtime/python_executor.py. */

#include "executor.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  KERNEL = 1,         /* kinds of steps */
  CLEAR = 2,
  COPY = 3,
  KERNEL_HEADER = 13, /* words of a kernel step before its places */
  CLEAR_WORDS = 4,
  COPY_WORDS = 5,
  ENTRY_BYTES = 32,
  PARAM_BYTES = 1024,
  DEVICES = 64,
  TABLE = 1024, /* of kernels; a power of two */
  STATIC_SHARED = 48 * 1024,
};
static const int64_t MAGIC = 0x6b6461636f7265; /* "kdacore" */

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

/* Look up the driver's functions, and forget what is known of kernels and devices: they were another driver's.
 * `numbers`: the first launch number. Returns NULL, or what is wrong. */
const char* kdacore_open(const char* library, const char* folder, int64_t numbers) {
  static char problem[512];
  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!loaded) {
    snprintf(problem, sizeof problem, "%s", dlerror());
    return problem;
  }
  for (size_t i = 0; i < sizeof driver_functions / sizeof *driver_functions; ++i) {
    *driver_functions[i].at = dlsym(loaded, driver_functions[i].name);
    if (!*driver_functions[i].at) {
      memset(&driver, 0, sizeof driver);
      snprintf(problem, sizeof problem, "%s has no %s", library, driver_functions[i].name);
      return problem;
    }
  }
  if (strlen(folder) >= sizeof cubin_folder) return "the path of the packaged cubins is too long";
  pthread_mutex_lock(&lock);
  strcpy(cubin_folder, folder);
  for (int i = 0; i < TABLE; ++i) free(kernels[i].cubin);
  memset(kernels, 0, sizeof kernels);
  memset(devices, 0, sizeof devices);
  kernel_count = 0;
  pthread_mutex_unlock(&lock);
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

/* Of a kernel that was just looked for and has no cubin: its place is free again. */
static void forget(Kernel* kernel) {
  if (kernel->id) --kernel_count;
  kernel->id = 0;
}

/* Keep a copy of a cubin. Returns 0, or 1 where there is no room. */
int kdacore_add_kernel(uint64_t id, const void* cubin, size_t size) {
  pthread_mutex_lock(&lock);
  Kernel* kernel = id ? find(id) : NULL;
  if (kernel && !kernel->cubin) {
    kernel->cubin = malloc(size);
    if (kernel->cubin) memcpy(kernel->cubin, cubin, size);
    else forget(kernel);
  }
  int failed = !kernel || !kernel->cubin;
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

/* --- failures -------------------------------------------------------------------------------- */

static int refused(Failure* failure, const char* call, int status) {
  const char* name = NULL;
  driver.cuGetErrorName(status, &name);
  failure->kind = DRIVER;
  failure->status = status;
  failure->call = call;
  snprintf(failure->text, sizeof failure->text, "%s", name ? name : "unknown error");
  return 1;
}

static int wrong(Failure* failure, int kind, const char* text) {
  failure->kind = kind;
  failure->status = 0;
  failure->call = NULL;
  snprintf(failure->text, sizeof failure->text, "%s", text);
  return 1;
}

static int malformed(Failure* failure, const char* what) {
  char text[256];
  snprintf(text, sizeof text, "the call was compiled by another version of kdacore, or is damaged: %s", what);
  return wrong(failure, INVALID, text);
}

static int too_many(Failure* failure, const char* step, int64_t count, const char* of) {
  char text[128];
  snprintf(text, sizeof text, "%s %lld %s: the call is damaged, or too large", step, (long long)count, of);
  return wrong(failure, INVALID, text);
}

/* --- one call -------------------------------------------------------------------------------- */

int kdacore_is_program(const Program* program, Failure* failure) {
  const int64_t* w = program->words;
  if (program->count < HEADER || w[0] != (MAGIC << 8 | FORMAT)) return malformed(failure, "its format");
  int64_t counts[] = {w[ARGUMENTS], w[RESULTS], w[NUMBERS]}, sum = 1;
  for (int i = 0; i < 3; ++i) {
    if (counts[i] < 0 || counts[i] > MOST_VALUES) return malformed(failure, "its values");
    sum += counts[i];
  }
  int64_t own = w[OWN_NUMBERS];
  if (sum > MOST_VALUES || (own && own != w[NUMBERS]) || program->count < HEADER + own) return malformed(failure, "its values");
  return 0;
}

/* Whether the current device is one that the program was planned for. */
static int check_device(const Program* program, int index, Failure* failure) {
  if (index < 0 || index >= DEVICES) return wrong(failure, DEVICE, "more than 64 GPUs in one process");
  Device* device = &devices[index];
  if (!__atomic_load_n(&device->known, __ATOMIC_ACQUIRE)) {
    int major = 0, minor = 0, status = driver.cuDeviceGetAttribute(&major, CAPABILITY_MAJOR, index);
    if (!status) status = driver.cuDeviceGetAttribute(&minor, CAPABILITY_MINOR, index);
    if (!status) status = driver.cuDeviceGetAttribute(&device->multiprocessors, MULTIPROCESSORS, index);
    if (status) return refused(failure, "cuDeviceGetAttribute", status);
    device->capability = 10 * major + minor;
    __atomic_store_n(&device->known, 1, __ATOMIC_RELEASE); /* two threads may both ask, and write the same */
  }
  if (device->capability == program->words[1] && device->multiprocessors == program->words[2]) return 0;
  char text[256];
  snprintf(text, sizeof text, "compiled for sm_%d with %d multiprocessors, but GPU %d is sm_%d with %d",
           (int)program->words[1], (int)program->words[2], index, device->capability, device->multiprocessors);
  return wrong(failure, DEVICE, text);
}

static int load(Kernel* kernel, const char* entry, Failure* failure) {
  if (!kernel->cubin) kernel->cubin = read_packaged(kernel->id);
  if (!kernel->cubin) {
    char text[256];
    snprintf(text, sizeof text,
             "no machine code %016llx of the kernel %s: the call was compiled by another version of kdacore",
             (unsigned long long)kernel->id, entry);
    return wrong(failure, INVALID, text);
  }
  void *library = NULL, *handle = NULL;
  int status = driver.cuLibraryLoadData(&library, kernel->cubin, NULL, NULL, 0, NULL, NULL, 0);
  if (status) return refused(failure, "cuLibraryLoadData", status);
  status = driver.cuLibraryGetKernel(&handle, library, entry);
  if (status) return refused(failure, "cuLibraryGetKernel", status);
  kernel->handle = handle;
  return 0;
}

/* The handle of a kernel that may use `shared` bytes on a device. */
static int prepare(uint64_t id, const void* entry, int shared, int device, void** handle, Failure* failure) {
  int failed = 0, mode = RELAXED;
  pthread_mutex_lock(&lock);
  Kernel* kernel = find(id);
  if (!kernel) {
    failed = wrong(failure, INVALID, "too many kernels in one process");
  } else if (!kernel->handle || (shared > STATIC_SHARED && shared > kernel->shared[device])) {
    char text[ENTRY_BYTES + 1] = {0};
    memcpy(text, entry, ENTRY_BYTES);
    driver.cuThreadExchangeStreamCaptureMode(&mode); /* the stream may be recording */
    if (!kernel->handle) failed = load(kernel, text, failure);
    if (!failed && shared > STATIC_SHARED && shared > kernel->shared[device]) {
      int status = driver.cuKernelSetAttribute(MAX_DYNAMIC_SHARED, shared, kernel->handle, device);
      if (status) failed = refused(failure, "cuKernelSetAttribute", status);
      else kernel->shared[device] = shared;
    }
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    if (!kernel->cubin) forget(kernel);
  }
  if (!failed) *handle = kernel->handle;
  pthread_mutex_unlock(&lock);
  return failed;
}

/* One step, with the values of its call. */
typedef struct {
  const int64_t* words;
  int64_t count;
  const int64_t* values;
  int64_t value_count;
  int device;
  void* stream;
} Step;

static int value_of(const Step* step, int64_t number, int64_t* value, Failure* failure) {
  if (number < 0 || number >= step->value_count) return malformed(failure, "the number of a value");
  *value = step->values[number];
  return 0;
}

/* The parameters of a launch: what its program gives, with the call's values in their places. */
static int fill(const Step* step, char* params, Failure* failure) {
  const int64_t* w = step->words;
  int64_t bytes = step->count < KERNEL_HEADER ? -1 : w[11], places = bytes < 0 ? -1 : w[12];
  if (bytes < 0 || bytes > PARAM_BYTES || bytes % 8 || places < 0 || places > PARAM_BYTES / 4 ||
      step->count != KERNEL_HEADER + 2 * places + bytes / 8) {
    return malformed(failure, "the length of a launch");
  }
  memcpy(params, w + KERNEL_HEADER + 2 * places, (size_t)bytes);
  for (int64_t i = 0; i < places; ++i) {
    const int64_t* place = w + KERNEL_HEADER + 2 * i;
    int64_t at = place[0] & 0xffff, width = place[0] >> 16 & 0xff, value = 0, more = 0;
    if ((width != 4 && width != 8) || at % width || at + width > bytes) return malformed(failure, "the place of a parameter");
    if (value_of(step, place[0] >> 32, &value, failure)) return 1;
    if (place[1] >= 0 && value_of(step, place[1], &more, failure)) return 1;
    value = (int64_t)((uint64_t)value + (uint64_t)more);
    memcpy(params + at, &value, (size_t)width); /* little-endian, as all machines with these GPUs */
  }
  return 0;
}

static int launch(const Step* step, Failure* failure) {
  _Alignas(16) char params[PARAM_BYTES];
  const int64_t* w = step->words;
  if (fill(step, params, failure)) return 1;
  int64_t grid = 0;
  if (value_of(step, w[7], &grid, failure)) return 1;
  if (!grid) return 0;
  if (grid < 0 || grid > INT32_MAX) return too_many(failure, "a launch of", grid, "blocks");
  void *handle = NULL, *arguments[1] = {params};
  if (prepare((uint64_t)w[2], w + 3, (int)w[9], step->device, &handle, failure)) return 1;
  LaunchAttribute overlap = {.id = PROGRAMMATIC_SERIALIZATION, .value = 1};
  LaunchConfig config = {
      .grid = {(unsigned)grid, 1, 1},
      .block = {(unsigned)w[8], 1, 1},
      .shared = (unsigned)w[9],
      .stream = step->stream,
      .attributes = &overlap,
      .attribute_count = w[10] ? 1 : 0,
  };
  int status = driver.cuLaunchKernelEx(&config, handle, arguments, NULL);
  return status ? refused(failure, "cuLaunchKernelEx", status) : 0;
}

static int clear(const Step* step, Failure* failure) {
  int64_t address = 0, bytes = 0;
  if (step->count != CLEAR_WORDS) return malformed(failure, "the length of a step");
  if (value_of(step, step->words[2], &address, failure) || value_of(step, step->words[3], &bytes, failure)) return 1;
  if (bytes < 0) return too_many(failure, "clearing", bytes, "bytes");
  if (!bytes) return 0;
  int status = driver.cuMemsetD8Async((void*)(uintptr_t)address, 0, (size_t)bytes, step->stream);
  return status ? refused(failure, "cuMemsetD8Async", status) : 0;
}

/* An argument to a result that should be the same memory, where XLA has given it other memory. */
static int copy(const Step* step, Failure* failure) {
  int64_t from = 0, to = 0, bytes = 0;
  if (step->count != COPY_WORDS) return malformed(failure, "the length of a step");
  if (value_of(step, step->words[2], &from, failure) || value_of(step, step->words[3], &to, failure)) return 1;
  if (value_of(step, step->words[4], &bytes, failure)) return 1;
  if (bytes < 0) return too_many(failure, "a copy of", bytes, "bytes");
  if (from == to || !bytes) return 0;
  int status = driver.cuMemcpyDtoDAsync_v2((void*)(uintptr_t)to, (const void*)(uintptr_t)from, (size_t)bytes, step->stream);
  return status ? refused(failure, "cuMemcpyDtoDAsync", status) : 0;
}

static int is_closed(Failure* failure) {
  return driver.cuLaunchKernelEx ? 0 : wrong(failure, DEVICE, "the driver was not opened");
}

int kdacore_execute(const Program* program, int64_t* values, void* stream, Failure* failure) {
  if (is_closed(failure)) return 1;
  int device = 0, status = driver.cuCtxGetDevice(&device);
  if (status) return refused(failure, "cuCtxGetDevice", status);
  if (check_device(program, device, failure)) return 1;
  const int64_t* w = program->words;
  Step step = {.values = values, .device = device, .stream = stream};
  step.value_count = 1 + w[ARGUMENTS] + w[RESULTS] + w[NUMBERS];
  values[0] = __atomic_fetch_add(&next_number, 1, __ATOMIC_RELAXED);
  memcpy(values + 1 + w[ARGUMENTS] + w[RESULTS], w + HEADER, (size_t)w[OWN_NUMBERS] * sizeof *values);
  int64_t at = HEADER + w[OWN_NUMBERS];
  for (int64_t i = 0; i < w[STEPS]; ++i, at += step.count) {
    step.words = w + at;
    step.count = at + 2 <= program->count ? w[at + 1] : -1;
    if (step.count < 2 || step.count > program->count - at) return malformed(failure, "the length of a step");
    int failed = step.words[0] == KERNEL  ? launch(&step, failure)
                 : step.words[0] == CLEAR ? clear(&step, failure)
                 : step.words[0] == COPY  ? copy(&step, failure)
                                          : malformed(failure, "an unknown step");
    if (failed) return 1;
  }
  return 0;
}

int kdacore_enter(void* stream, void** entered, Failure* failure) {
  void *context = NULL, *current = NULL;
  *entered = NULL;
  int status = driver.cuStreamGetCtx ? driver.cuStreamGetCtx(stream, &context) : 0;
  if (status) return refused(failure, "cuStreamGetCtx", status);
  if (!context) return 0;
  driver.cuCtxGetCurrent(&current);
  if (context == current) return 0;
  status = driver.cuCtxPushCurrent_v2(context);
  if (status) return refused(failure, "cuCtxPushCurrent", status);
  *entered = context;
  return 0;
}

void kdacore_leave(void* entered) {
  if (entered) driver.cuCtxPopCurrent_v2(&entered);
}

/* --- for Python ------------------------------------------------------------------------------ */

static __thread Failure last_failure;

/* Why the thread's last call failed. */
const Failure* kdacore_failure(void) { return &last_failure; }

/* Make the launches of a program: `values` are the addresses of its arrays, then its numbers unless it has them itself.
 * Returns 0, or 1. */
int kdacore_run(const int64_t* words, int64_t count, const int64_t* values, int64_t value_count, void* stream) {
  int64_t all[MOST_VALUES];
  Program program = {words, count};
  if (kdacore_is_program(&program, &last_failure)) return 1;
  int64_t numbers = words[NUMBERS] - words[OWN_NUMBERS];
  if (value_count != words[ARGUMENTS] + words[RESULTS] + numbers) return malformed(&last_failure, "its values");
  memcpy(all + 1, values, (size_t)value_count * sizeof *values);
  return kdacore_execute(&program, all, stream, &last_failure);
}

/* The handle of a kernel that may use `shared` bytes on a device. Returns 0, or 1. */
int kdacore_handle(uint64_t id, const char* entry, int shared, int device, void** handle) {
  char text[ENTRY_BYTES] = {0};
  if (is_closed(&last_failure)) return 1;
  if (device < 0 || device >= DEVICES) return wrong(&last_failure, DEVICE, "more than 64 GPUs in one process");
  strncpy(text, entry, sizeof text);
  return prepare(id, text, shared, device, handle, &last_failure);
}
