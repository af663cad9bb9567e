/* A tool that NVTX loads (NVTX_INJECTION64_PATH) and that writes down each range: a line "start NAME", "end",
 * "push NAME" or "pop" in the file STANDIN_RANGES, appended by all threads and processes. */
#include <fcntl.h>
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static int file = -1;

static void note(const char *what, const char *name)
{
    char line[256];
    int n = snprintf(line, sizeof line, "%s%s%s\n", what, name[0] != '\0' ? " " : "", name);
    if (file >= 0 && n > 0 && write(file, line, (size_t)n) != n)
        abort();
}

static nvtxRangeId_t start(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *a)
{
    static _Atomic uint64_t ids;
    (void)domain;
    note("start", a->message.ascii);
    return ++ids;
}

static void end(nvtxDomainHandle_t domain, nvtxRangeId_t id)
{
    (void)domain;
    if (id == 0)
        abort(); /* what was never started */
    note("end", "");
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *a)
{
    (void)domain;
    note("push", a->message.ascii);
    return 0;
}

static int pop(nvtxDomainHandle_t domain)
{
    (void)domain;
    note("pop", "");
    return 0;
}

static void put(NvtxFunctionTable table, unsigned id, void (*fn)(void))
{
    *table[id] = fn;
}

EXPORT int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get)
{
    NvtxFunctionTable table = NULL;
    unsigned n = 0;
    const NvtxExportTableCallbacks *callbacks = get(NVTX_ETID_CALLBACKS);
    const char *path = getenv("STANDIN_RANGES");
    if (callbacks == NULL ||
        callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &n) == 0 ||
        n <= NVTX_CBID_CORE2_DomainRangePop)
        return 0;
    file = path == NULL ? -1 : open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    put(table, NVTX_CBID_CORE2_DomainRangeStartEx, (void (*)(void))start);
    put(table, NVTX_CBID_CORE2_DomainRangeEnd, (void (*)(void))end);
    put(table, NVTX_CBID_CORE2_DomainRangePushEx, (void (*)(void))push);
    put(table, NVTX_CBID_CORE2_DomainRangePop, (void (*)(void))pop);
    return 1;
}
