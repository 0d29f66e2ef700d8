/* A stand-in for NVIDIA's libnvidia-ml.so.1: what kvplan calls of it, and nothing else.
 *
 * Two GPUs. The first has no MIG; the second has one MIG device, in the second of its places.
 * The environment drives it:
 *   FAKE_NVML_ERRORS     function=code or function@UUID=code, several after commas; the code that it returns
 *   FAKE_NVML_PROCESSES  id:bytes, several after commas; bytes of -1 stand for memory that is not available
 *   FAKE_NVML_NAME       the name of every device
 *   FAKE_NVML_EVENTS     the bits of the clock events
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       ARGUMENT_VERSION_MISMATCH = 25 };
enum { CLOCK_SM = 1, CLOCK_MEM = 2, UNCORRECTED = 1, VOLATILE = 0, PLACES = 7, PART_PLACE = 1 };

typedef struct device {
    const char *uuid, *name;
    unsigned long long total, reserved, used;
    unsigned milliwatts, sm_mhz, memory_mhz, ecc, mig;
    unsigned long long errors;
    struct device *whole; /* of a MIG device, else NULL */
} Device;

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } Process;

static Device devices[] = {
    {"GPU-00000000-0000-0000-0000-000000000000", "Fake H200", 1000000, 1000, 200000, 312500, 1980, 3201, 1, 0, 0, NULL},
    {"GPU-11111111-1111-1111-1111-111111111111", "Fake A100", 500000, 500, 100000, 55000, 1410, 1215, 0, 1, 2, NULL},
    {"MIG-22222222-2222-2222-2222-222222222222", "Fake A100 MIG 1g", 70000, 70, 30000, 0, 0, 0, 0, 0, 0, &devices[1]},
};
static int started = 0;

/* How often the library was started and not stopped again. */
int fake_started(void) { return started; }

static int listed(const char *key) {
    const char *list = getenv("FAKE_NVML_ERRORS");
    size_t length = strlen(key);
    for (const char *at = list; at != NULL && *at != '\0'; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, key, length) == 0 && at[length] == '=') return atoi(at + length + 1);
    return SUCCESS;
}

static int error_of(const char *function, const Device *device) {
    char key[256];
    if (!started) return UNINITIALIZED;
    if (device != NULL) {
        snprintf(key, sizeof key, "%s@%s", function, device->uuid);
        int code = listed(key);
        if (code != SUCCESS) return code;
    }
    return listed(function);
}

#define MAY_FAIL(device) do { int code = error_of(__func__, device); if (code != SUCCESS) return code; } while (0)
#define WHOLE_ONLY(device) do { if ((device)->whole != NULL) return NOT_SUPPORTED; } while (0)

static int give_text(const char *text, char *buffer, unsigned size) {
    return (unsigned)snprintf(buffer, size, "%s", text) < size ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = listed(__func__);
    if (code == SUCCESS) started++;
    return code;
}

int nvmlShutdown(void) {
    MAY_FAIL(NULL);
    started--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == 42 ? "an error of tomorrow" : "Unknown Error"; }

int nvmlSystemGetDriverVersion(char *buffer, unsigned size) {
    MAY_FAIL(NULL);
    return give_text("580.65.06", buffer, size);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    MAY_FAIL(NULL);
    *version = 12090;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    MAY_FAIL(NULL);
    *count = 2;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index >= 2) return INVALID_ARGUMENT;
    MAY_FAIL(&devices[index]);
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    MAY_FAIL(NULL);
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (strcmp(devices[i].uuid, uuid) == 0) {
            *device = &devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
    MAY_FAIL(device);
    *count = device->mig ? PLACES : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned place, Device **part) {
    MAY_FAIL(device);
    if (devices[2].whole != device || place != PART_PLACE) return NOT_FOUND;
    *part = &devices[2];
    return SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *part, Device **device) {
    MAY_FAIL(part);
    if (part->whole == NULL) return INVALID_ARGUMENT;
    *device = part->whole;
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *buffer, unsigned size) {
    MAY_FAIL(device);
    return give_text(device->uuid, buffer, size);
}

int nvmlDeviceGetName(Device *device, char *buffer, unsigned size) {
    MAY_FAIL(device);
    const char *name = getenv("FAKE_NVML_NAME");
    return give_text(name ? name : device->name, buffer, size);
}

int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory *memory) {
    MAY_FAIL(device);
    if (memory->version != (sizeof(Memory) | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    memory->total = device->total;
    memory->reserved = device->reserved;
    memory->used = device->used++; /* never the same twice: who asks twice mixes two moments */
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *processes) {
    MAY_FAIL(device);
    unsigned found = 0;
    const char *at = getenv("FAKE_NVML_PROCESSES");
    while (at != NULL && *at != '\0') {
        if (processes != NULL && found < *count) {
            char *end = NULL;
            processes[found].pid = (unsigned)strtoul(at, &end, 10);
            processes[found].bytes = (unsigned long long)strtoll(end + 1, NULL, 10);
        }
        found++;
        at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL;
    }
    int fits = found <= *count;
    *count = found;
    return fits ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
    MAY_FAIL(device);
    WHOLE_ONLY(device);
    *milliwatts = device->milliwatts;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(Device *device, unsigned domain, unsigned *mhz) {
    MAY_FAIL(device);
    WHOLE_ONLY(device);
    if (domain != CLOCK_SM && domain != CLOCK_MEM) return INVALID_ARGUMENT;
    *mhz = domain == CLOCK_SM ? device->sm_mhz : device->memory_mhz;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *bits) {
    MAY_FAIL(device);
    WHOLE_ONLY(device);
    const char *events = getenv("FAKE_NVML_EVENTS");
    *bits = events ? strtoull(events, NULL, 0) : 0;
    return SUCCESS;
}

int nvmlDeviceGetEccMode(Device *device, unsigned *now, unsigned *pending) {
    MAY_FAIL(device);
    WHOLE_ONLY(device);
    *now = device->ecc;
    *pending = !device->ecc;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device *device, unsigned kind, unsigned counter, unsigned long long *count) {
    MAY_FAIL(device);
    WHOLE_ONLY(device);
    if (kind != UNCORRECTED || counter != VOLATILE) return INVALID_ARGUMENT;
    *count = device->errors;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *now, unsigned *pending) {
    MAY_FAIL(device);
    WHOLE_ONLY(device);
    *now = device->mig;
    *pending = !device->mig;
    return SUCCESS;
}
