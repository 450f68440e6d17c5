/* SPDX-License-Identifier: Apache-2.0
 * Memory of a GPU that others have allocated, lent and borrowed, on tests/fakecuda. */
#include <fcntl.h>
#include <sys/mman.h>

#include "cuda_fixture.h"
#include "device/cuda_ipc.h"
#include "device/cuda_lend.h"

enum { PIECE = 2 << 20, PIECES = 3, MOST = 8 };

/* Pieces side by side, as torch maps expandable segments. */
typedef struct mapping {
    const wsync_cuda_device_t *device;
    wsync_cu_ptr_t at;
    size_t count;
} mapping_t;

static void map_piece(const mapping_t *mapping, size_t index, int types)
{
    const wsync_cuda_driver_t *cu = mapping->device->driver;
    const wsync_cu_location_t where = {WSYNC_CU_LOCATION_DEVICE,
                                       mapping->device->base.ordinal};
    const wsync_cu_property_t property = {
        .type = WSYNC_CU_ALLOCATION_PINNED, .handle_types = types, .location = where};
    const wsync_cu_access_t access = {where, WSYNC_CU_ACCESS_READ_WRITE};
    const wsync_cu_ptr_t at = mapping->at + index * PIECE;
    wsync_cu_handle_t handle = 0;

    CU(cu->mem_create(&handle, PIECE, &property, 0));
    CU(cu->mem_map(at, PIECE, 0, handle, 0));
    CU(cu->mem_release(handle));
    CU(cu->mem_set_access(at, PIECE, &access, 1));
}

static mapping_t make_mapping(const wsync_cuda_device_t *device, size_t count)
{
    mapping_t made = {.device = device, .count = count};

    CU(device->driver->mem_reserve(&made.at, count * PIECE, 0, 0, 0));
    for (size_t i = 0; i < count; i++) {
        map_piece(&made, i, WSYNC_CU_HANDLE_FD);
    }
    return made;
}

static void end_mapping(const mapping_t *mapping)
{
    for (size_t i = 0; i < mapping->count; i++) {
        CU(mapping->device->driver->mem_unmap(mapping->at + i * PIECE, PIECE));
    }
    CU(mapping->device->driver->mem_unreserve(mapping->at, mapping->count * PIECE));
}

typedef struct found {
    wsync_cuda_allocation_t items[MOST];
    size_t count;
} found_t;

static found_t find(const wsync_cuda_device_t *device, const wsync_span_t *spans,
                    size_t count)
{
    wsync_cuda_allocation_t *items = NULL;
    wsync_cuda_ranges_t ranges = {0};
    found_t found = {.count = 0};
    wsync_error_t err = {0};

    CHECK_OK(wsync_cuda_enter(device, &err), err);
    CHECK_OK(wsync_cuda_find_ranges(device, spans, count, &ranges, NULL, &err), err);
    CHECK_OK(wsync_cuda_identify(device, &ranges, &items, &err), err);
    wsync_cuda_leave(device);
    found.count = ranges.count;
    CHECK(found.count <= MOST);
    for (size_t i = 0; i < found.count; i++) {
        found.items[i] = items[i];
    }
    free(items);
    free(ranges.items);
    return found;
}

static found_t find_at(const wsync_cuda_device_t *device, wsync_cu_ptr_t at,
                       uint64_t nbytes)
{
    return find(device, &(wsync_span_t){(void *)(uintptr_t)at, nbytes}, 1);
}

static wsync_memory_t *lend(const wsync_cuda_device_t *device, const found_t *found)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_cuda_lend(device, found->items, found->count, &memory, &err), err);
    CHECK((fcntl(memory->fd, F_GETFD) & FD_CLOEXEC) != 0);
    return memory;
}

/* The descriptors of lent memory; count: the record's, and one. */
static const int *fds_of(const wsync_memory_t *memory)
{
    static int fds[MOST + 1];

    fds[0] = memory->fd;
    for (size_t i = 0; i < memory->more_count; i++) {
        fds[i + 1] = memory->more[i];
    }
    return fds;
}

static wsync_memory_t *borrow(const wsync_cuda_device_t *device, const wsync_memory_t *lent)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_borrow(&device->base, fds_of(lent), lent->more_count + 1, &memory,
                                 &err),
             err);
    CHECK(memory->lent);
    CHECK_EQ(memory->nbytes, lent->nbytes);
    return memory;
}

TEST(pieces_lie_side_by_side_again)
{
    const wsync_cuda_device_t *device = open_device(0);
    const mapping_t mapping = make_mapping(device, PIECES);
    const found_t found = find_at(device, mapping.at + 5, PIECES * PIECE - 5);
    unsigned char *bytes = reach((void *)(uintptr_t)mapping.at);
    wsync_memory_t *lent;
    wsync_memory_t *borrowed;
    wsync_error_t err = {0};

    CHECK_EQ(found.count, PIECES);
    for (size_t i = 0; i < PIECES; i++) {
        CHECK_EQ(found.items[i].at, mapping.at + i * PIECE);
        CHECK_EQ(found.items[i].nbytes, PIECE);
        CHECK(found.items[i].piece && found.items[i].identity != 0);
        bytes[(i + 1) * PIECE - 1] = (unsigned char)(i + 1);
    }
    lent = lend(device, &found);
    CHECK_EQ(lent->nbytes, PIECES * PIECE);
    CHECK_EQ(lent->more_count, PIECES);
    borrowed = borrow(device, lent);
    CHECK(borrowed->data != lent->data);
    CHECK(wsync_cuda_retire(lent));
    wsync_memory_destroy(lent);
    end_mapping(&mapping); /* the borrower keeps the memory */
    for (size_t i = 0; i < PIECES; i++) {
        CHECK_EQ(bytes_of(borrowed)[(i + 1) * PIECE - 1], i + 1);
    }
    CHECK_OK(wsync_memory_check_lent(borrowed, &err), err);
    CHECK_OK(wsync_memory_park(borrowed, &err), err);
    CHECK_EQ(fake_census().physical, 0);
    CHECK_EQ(wsync_memory_park(borrowed, &err), WSYNC_ERR_STATE);
    wsync_memory_destroy(borrowed);
    check_clean();
}

/* Whoever pins what is there in part only, reads what is not there. */
TEST(what_is_parked_in_part_is_not_whole)
{
    const wsync_cuda_device_t *device = open_device(0);
    const mapping_t mapping = make_mapping(device, PIECES);
    const found_t found = find_at(device, mapping.at, PIECES * PIECE);
    wsync_memory_t *lent = lend(device, &found);
    wsync_memory_t *borrowed = borrow(device, lent);
    wsync_error_t err = {0};

    fake_lose("cuMemUnmap", 1, WSYNC_CU_LAUNCH_FAILED);
    CHECK_EQ(wsync_memory_park(borrowed, &err), WSYNC_ERR_DEVICE);
    CHECK_HAS(err.message, "cuMemUnmap");
    CHECK_EQ(wsync_memory_pin(borrowed, &err), WSYNC_ERR_STATE);
    wsync_memory_destroy(borrowed);
    wsync_memory_destroy(lent);
}

TEST(what_lies_apart_is_lent_apart)
{
    const wsync_cuda_device_t *device = open_device(0);
    const mapping_t mapping = make_mapping(device, PIECES);
    const wsync_span_t spans[] = {
        {(void *)(uintptr_t)(mapping.at + 2 * PIECE + 1), 2},
        {(void *)(uintptr_t)mapping.at, 8},
        {NULL, 0},
        {(void *)(uintptr_t)(mapping.at + 2 * PIECE + 100), 2},
    };
    found_t found = find(device, spans, 4);
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_EQ(found.count, 2);
    CHECK_EQ(found.items[0].at, mapping.at);
    CHECK_EQ(found.items[1].at, mapping.at + 2 * PIECE);
    CHECK_EQ(wsync_cuda_lend(device, found.items, 2, &memory, &err), WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "cannot be lent side by side");
    CHECK_EQ(wsync_cuda_lend(device, found.items, 0, &memory, &err), WSYNC_ERR_INVALID);
    CHECK(memory == NULL);
    end_mapping(&mapping);
    check_clean();
}

TEST(a_driver_without_memory_that_is_only_read_maps_it_all_the_same)
{
    const wsync_cuda_device_t *device = open_device(0);
    const mapping_t mapping = make_mapping(device, 1);
    const found_t found = find_at(device, mapping.at, PIECE);
    wsync_memory_t *lent = lend(device, &found);
    wsync_memory_t *borrowed;

    fake_fail("cuMemSetAccess", 0, WSYNC_CU_NOT_SUPPORTED);
    borrowed = borrow(device, lent);
    fake_fail("*", -1, 0);
    bytes_of(borrowed)[1] = 7;
    CHECK_EQ(((unsigned char *)reach((void *)(uintptr_t)mapping.at))[1], 7);
    wsync_memory_destroy(borrowed);
    wsync_memory_destroy(lent);
    end_mapping(&mapping);
    check_clean();
}

/* --- by IPC handle ----------------------------------------------------------------------
 */

/* --- each driver call fails in turn -----------------------------------------------------
 */
