/* Ranges of time for a profiler, by NVTX: header-only, it loads the tool that NVTX_INJECTION64_PATH names
 * (nsys sets it), and is a look at a pointer where there is none. A toolkit that lacks the header makes a
 * build without ranges. */
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define HAS_NVTX 1
#else
#define HAS_NVTX 0
#endif

#include <pthread.h>

#include "device/device_cuda_private.h"

#include "base/banned.h"

#if HAS_NVTX

static nvtxDomainHandle_t domain;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_domain(void)
{
    domain = nvtxDomainCreateA("reshard");
}

static nvtxEventAttributes_t attributes_of(const char *name)
{
    nvtxEventAttributes_t a = {.version = NVTX_VERSION,
                               .size = NVTX_EVENT_ATTRIB_STRUCT_SIZE,
                               .messageType = NVTX_MESSAGE_TYPE_ASCII,
                               .message = {.ascii = name}};
    (void)pthread_once(&once, make_domain);
    return a;
}

void cuda_range_push(const char *name)
{
    const nvtxEventAttributes_t a = attributes_of(name);
    (void)nvtxDomainRangePushEx(domain, &a);
}

void cuda_range_pop(void)
{
    (void)nvtxDomainRangePop(domain);
}

uint64_t cuda_range_start(const struct device *d, const char *name)
{
    const nvtxEventAttributes_t a = attributes_of(name);
    (void)d;
    return nvtxDomainRangeStartEx(domain, &a);
}

void cuda_range_end(const struct device *d, uint64_t range)
{
    (void)d;
    nvtxDomainRangeEnd(domain, range);
}

#else

void cuda_range_push(const char *name)
{
    (void)name;
}

void cuda_range_pop(void)
{
}

uint64_t cuda_range_start(const struct device *d, const char *name)
{
    (void)d;
    (void)name;
    return 0;
}

void cuda_range_end(const struct device *d, uint64_t range)
{
    (void)d;
    (void)range;
}

#endif
