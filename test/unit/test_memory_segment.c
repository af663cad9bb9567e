/* Segments: what is refused before it is mapped, and the table of what is mapped. */
#include <check.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/mem.h"
#include "memory/memory.h"

enum { BYTES = 64 * 1024 };

static int memfd(uint64_t bytes, int seals)
{
    int fd = memfd_create("segment", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ftruncate(fd, (off_t)bytes), 0);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static uint64_t allocated(int fd)
{
    struct stat st;
    ck_assert_int_eq(fstat(fd, &st), 0);
    return (uint64_t)st.st_blocks * 512;
}

static void refused(int fd, uint64_t bytes, const char *remedy)
{
    struct err e = {0};
    ck_assert_int_eq(segment_check(fd, bytes, &e), RS_EINVAL);
    ck_assert_msg(strstr(e.text, remedy) != NULL, "%s", e.text);
    (void)close(fd);
}

START_TEST(a_sealed_memfd_is_accepted_and_all_its_pages_are_there_afterwards)
{
    struct err e = {0};
    int fd = memfd(BYTES, F_SEAL_SHRINK);
    ck_assert_uint_eq(allocated(fd), 0);
    ck_assert_int_eq(segment_check(fd, BYTES, &e), 0);
    ck_assert_uint_ge(allocated(fd), BYTES);
    ck_assert_int_eq(segment_check(fd, BYTES / 2, &e), 0);
    ck_assert_int_ne(ftruncate(fd, 0), 0); /* the client, later */
    (void)close(fd);
}
END_TEST

START_TEST(a_file_that_could_be_truncated_is_refused_with_the_remedy)
{
    refused(memfd(BYTES, F_SEAL_GROW), BYTES, "F_ADD_SEALS, F_SEAL_SHRINK");
    refused(memfd(BYTES, F_SEAL_SEAL), BYTES, "MFD_ALLOW_SEALING");
    int fd = memfd_create("segment", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, BYTES), 0);
    refused(fd, BYTES, "MFD_ALLOW_SEALING");
}
END_TEST

START_TEST(what_is_no_shared_memory_is_refused)
{
    int pipes[2];
    ck_assert_int_eq(pipe(pipes), 0);
    refused(pipes[0], BYTES, "memfd_create");
    (void)close(pipes[1]);
    refused(open("/", O_RDONLY | O_DIRECTORY), BYTES, "memfd_create");
    refused(open("/dev/zero", O_RDWR), BYTES, "memfd_create");
    refused(open("/proc/self/exe", O_RDONLY), BYTES, "memfd_create");
    refused(-1, BYTES, "memfd");
}
END_TEST

START_TEST(a_segment_that_is_shorter_than_declared_is_refused)
{
    refused(memfd(BYTES, F_SEAL_SHRINK), BYTES + 1, "ftruncate");
    refused(memfd(BYTES, F_SEAL_SHRINK), UINT64_MAX, "ftruncate");
}
END_TEST

/* A worker without rows has no memory. */
START_TEST(no_bytes_need_no_memory)
{
    struct err e = {0};
    ck_assert_int_eq(segment_check(-1, 0, &e), 0);
}
END_TEST

static int read_only(int fd)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int again = open(path, O_RDONLY);
    ck_assert_int_ge(again, 0);
    return again;
}

START_TEST(a_read_only_descriptor_is_accepted_only_if_its_pages_are_there)
{
    struct err e = {0};
    int fd = memfd(BYTES, F_SEAL_SHRINK), again = read_only(fd);
    refused(again, BYTES, "fallocate");
    ck_assert_int_eq(fallocate(fd, 0, 0, BYTES), 0);
    again = read_only(fd);
    ck_assert_int_eq(segment_check(again, BYTES, &e), 0);
    (void)close(again);
    (void)close(fd);
}
END_TEST

START_TEST(more_than_the_memory_that_is_available_is_refused_before_a_page_is_taken)
{
    const uint64_t bytes = UINT64_C(1) << 44; /* 16 TiB */
    struct err e = {0};
    int fd = memfd(bytes, F_SEAL_SHRINK);
    /* Without the refusal this would go on until the machine is out of memory: a second of CPU time is the end of it. */
    struct itimerval second = {.it_value = {.tv_sec = 1}}, never = {.it_value = {.tv_sec = 0}};
    (void)setitimer(ITIMER_PROF, &second, NULL);
    ck_assert_int_eq(segment_check(fd, bytes, &e), RS_EEXHAUSTED);
    (void)setitimer(ITIMER_PROF, &never, NULL);
    ck_assert_ptr_nonnull(strstr(e.text, "hand over less"));
    ck_assert_uint_eq(allocated(fd), 0);
    (void)close(fd);
}
END_TEST

/* --- the table -------------------------------------------------------------------------------- */

static struct device *open_device(void)
{
    struct device *d = NULL;
    ck_assert_int_eq(device_host_open(0, NULL, &d, NULL), 0);
    return d;
}

START_TEST(the_table_finds_each_workers_segments_by_number_with_holes)
{
    struct device *d = open_device();
    struct segment_table *t = segment_table_new();
    struct err e = {0};
    uint32_t n;
    int keep = memfd(BYTES, F_SEAL_SHRINK);
    ck_assert_int_eq(segment_table_map(t, d, 7, 2, dup(keep), BYTES, true, &e), 0);
    ck_assert_int_eq(segment_table_map(t, d, 9, 0, memfd(BYTES, F_SEAL_SHRINK), BYTES, true, &e),
                     0);
    void *const *bases = segment_table_bases(t, 7, &n);
    ck_assert_uint_eq(n, 3);
    ck_assert_ptr_null(bases[0]);
    ck_assert_ptr_null(bases[1]);
    memcpy(bases[2], "abc", 4);
    char text[4];
    ck_assert_int_eq(pread(keep, text, 4, 0), 4);
    ck_assert_str_eq(text, "abc");
    ck_assert_uint_eq(segment_table_unmap(t, 7), 1);
    ck_assert_uint_eq(segment_table_unmap(t, 7), 0);
    ck_assert_ptr_null(segment_table_bases(t, 7, &n));
    ck_assert_uint_eq(n, 0);
    ck_assert_ptr_nonnull(segment_table_bases(t, 9, &n)[0]);
    segment_table_free(t);
    (void)close(keep);
    device_close(d);
}
END_TEST

START_TEST(a_segment_is_mapped_once_and_a_refused_descriptor_stays_the_callers)
{
    struct device *d = open_device();
    struct segment_table *t = segment_table_new();
    struct err e = {0};
    int fd = memfd(BYTES, F_SEAL_SHRINK);
    ck_assert_int_eq(segment_table_map(t, d, 1, 0, dup(fd), BYTES, true, &e), 0);
    ck_assert_int_eq(segment_table_map(t, d, 1, 0, fd, BYTES, true, &e), RS_EEXIST);
    ck_assert_int_eq(segment_table_map(t, d, 1, SEGMENT_MAX_PER_WORKER, fd, BYTES, true, &e),
                     RS_EINVAL);
    ck_assert_int_eq(segment_table_map(t, d, 1, 1, fd, 2 * BYTES, true, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "segment 1"));
    ck_assert_int_ge(fcntl(fd, F_GETFD), 0);
    ck_assert_int_eq(segment_table_map(t, d, 1, 1, -1, 0, true, &e), 0); /* no bytes */
    ck_assert_int_eq(segment_table_map(t, d, 1, 1, -1, 0, true, &e), RS_EEXIST);
    ck_assert_uint_eq(segment_table_unmap(t, 1), 2);
    segment_table_free(t);
    (void)close(fd);
    device_close(d);
}
END_TEST

START_TEST(a_mapping_does_not_hold_the_descriptor_and_free_unmaps_all)
{
    struct device *d = open_device();
    struct segment_table *t = segment_table_new();
    struct err e = {0};
    int fd = memfd(BYTES, F_SEAL_SHRINK);
    ck_assert_int_eq(segment_table_map(t, d, 1, 0, fd, BYTES, false, &e), 0);
    ck_assert_int_eq(fcntl(fd, F_GETFD), -1);
    uint32_t n;
    void *base = segment_table_bases(t, 1, &n)[0];
    segment_table_free(t);
    unsigned char resident;
    ck_assert_int_ne(mincore(base, 4096, &resident), 0); /* ENOMEM: not mapped */
    device_close(d);
}
END_TEST

START_TEST(a_host_device_imports_nothing_and_a_range_that_leaves_its_allocation_is_refused)
{
    struct device *d = open_device();
    struct segment_table *t = segment_table_new();
    struct err e = {0};
    uint8_t handle[DEVICE_IPC_BYTES] = {1};
    struct device_import from = {
        .kind = DEVICE_IMPORT_IPC, .handle = handle, .fd = -1, .bytes = BYTES};
    ck_assert_str_eq(device_name(d), "");
    ck_assert_int_eq(segment_table_import(t, d, 1, 0, &from, 0, BYTES, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "memfd"));
    ck_assert_int_eq(segment_table_import(t, d, 1, 0, &from, 1, BYTES, &e), RS_EINVAL);
    ck_assert_int_eq(segment_table_import(t, d, 1, 0, &from, UINT64_MAX, 2, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "leave the allocation"));
    ck_assert_uint_eq(segment_table_unmap(t, 1), 0);
    segment_table_free(t);
    device_close(d);
}
END_TEST

START_TEST(every_failed_allocation_is_an_error_and_leaks_nothing)
{
    struct device *d = open_device();
    for (long i = 1;; i++) {
        struct err e = {0};
        int fd = memfd(BYTES, F_SEAL_SHRINK), r = RS_ENOMEM;
        mem_fail_at(i);
        struct segment_table *t = segment_table_new();
        if (t != NULL)
            r = segment_table_map(t, d, 1, 9, fd, BYTES, true, &e);
        int failed = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(r, failed ? RS_ENOMEM : 0);
        segment_table_free(t);
        if (!failed)
            break;
        ck_assert_int_eq(close(fd), 0);
    }
    device_close(d);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_sealed_memfd_is_accepted_and_all_its_pages_are_there_afterwards)                           \
    X(a_file_that_could_be_truncated_is_refused_with_the_remedy)                                   \
    X(what_is_no_shared_memory_is_refused)                                                         \
    X(a_segment_that_is_shorter_than_declared_is_refused)                                          \
    X(no_bytes_need_no_memory)                                                                     \
    X(a_read_only_descriptor_is_accepted_only_if_its_pages_are_there)                              \
    X(more_than_the_memory_that_is_available_is_refused_before_a_page_is_taken)                    \
    X(the_table_finds_each_workers_segments_by_number_with_holes)                                  \
    X(a_segment_is_mapped_once_and_a_refused_descriptor_stays_the_callers)                         \
    X(a_host_device_imports_nothing_and_a_range_that_leaves_its_allocation_is_refused)             \
    X(a_mapping_does_not_hold_the_descriptor_and_free_unmaps_all)                                  \
    X(every_failed_allocation_is_an_error_and_leaks_nothing)
#include "test/lib/main.h"
