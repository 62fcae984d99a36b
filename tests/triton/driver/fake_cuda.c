/* A CUDA driver that launches nothing and remembers what it was asked to launch. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    void *attrs;
    unsigned num_attrs;
} LaunchConfig;

static int count, sizes[128];
static struct { unsigned grid[3], block[3]; uint64_t stream, function, params[128]; int launches; } last;

void fake_expect(int n, const int *bytes) { count = n; memcpy(sizes, bytes, n * sizeof(int)); }
const void *fake_last(void) { return &last; }

int cuLaunchKernelEx(const LaunchConfig *config, void *function, void **params, void **extra) {
    memcpy(last.grid, config->grid, sizeof last.grid);
    memcpy(last.block, config->block, sizeof last.block);
    last.stream = (uint64_t)config->stream;
    last.function = (uint64_t)function;
    memset(last.params, 0, sizeof last.params);
    for (int i = 0; i < count; i++) memcpy(&last.params[i], params[i], sizes[i]);
    last.launches++;
    return 0;
}

int cuModuleLoadData(void **module, const void *image) { *module = (void *)image; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    static uint64_t next = 1000;
    *function = (void *)next++;
    return 0;
}
int cuModuleUnload(void *module) { return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) { *value = pointer; return 0; }
int cuPointerGetAttributes(unsigned n, int *attributes, void **values, uint64_t pointer) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "fake"; return 0; }
int cuCtxGetCurrent(void **context) { *context = &last; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &last; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { return 0; }
static int attributes[16];
int fake_attribute(int attribute) { return attributes[attribute]; }
int cuFuncSetAttribute(void *function, int attribute, int value) { attributes[attribute] = value; return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuOccupancyMaxActiveClusters(int *n, void *function, const void *config) { *n = 1; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
