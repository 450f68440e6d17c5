/* SPDX-License-Identifier: Apache-2.0
 * Memory of a GPU that others have allocated, lent and borrowed, on tests/fakecuda. */
#include <fcntl.h>
#include <sys/mman.h>

#include "cuda_fixture.h"
#include "device/cuda_handle_memfd.h"
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
    found_t found = {.count = 0};
    wsync_error_t err = {0};

    CHECK_OK(wsync_cuda_enter(device, &err), err);
    CHECK_OK(wsync_cuda_find_allocations(device, spans, count, &items, &found.count, &err),
             err);
    wsync_cuda_leave(device);
    CHECK(found.count <= MOST);
    for (size_t i = 0; i < found.count; i++) {
        found.items[i] = items[i];
    }
    free(items);
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

static void check_refused(const wsync_cuda_device_t *device, const int *fds, size_t count,
                          wsync_status_t status, const char *part)
{
    const fakecuda_census_t before = fake_census();
    const int free_fd = first_free_fd();
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};
    fakecuda_census_t after;

    CHECK_EQ(wsync_memory_borrow(&device->base, fds, count, &memory, &err), status);
    CHECK_HAS(err.message, part);
    CHECK_EQ(wsync_memory_borrow(&device->base, fds, count, &memory, NULL), status);
    CHECK(memory == NULL);
    after = fake_census();
    CHECK(memcmp(&before, &after, sizeof(after)) == 0);
    CHECK_EQ(first_free_fd(), free_fd);
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

TEST(memory_that_replaces_other_memory_is_told_apart)
{
    const wsync_cuda_device_t *device = open_device(0);
    const mapping_t mapping = make_mapping(device, 1);
    const found_t found = find_at(device, mapping.at, PIECE);
    wsync_memory_t *lent = lend(device, &found);
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};
    found_t again = find_at(device, mapping.at, 1);

    CHECK_EQ(again.items[0].identity, found.items[0].identity);
    CU(device->driver->mem_unmap(mapping.at, PIECE));
    CHECK_EQ(find_at(device, mapping.at, 1).count, 0);
    CHECK_EQ(wsync_cuda_lend(device, found.items, 1, &memory, &err), WSYNC_ERR_DEVICE);
    map_piece(&mapping, 0, WSYNC_CU_HANDLE_FD);
    again = find_at(device, mapping.at, 1);
    CHECK(again.items[0].identity != found.items[0].identity);
    CHECK_EQ(wsync_cuda_lend(device, found.items, 1, &memory, &err), WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "have been replaced");
    CHECK(memory == NULL);
    wsync_memory_destroy(lent);
    end_mapping(&mapping);
    check_clean();
}

/* What the driver gives to no other process, or with more than was asked for. */
TEST(what_cannot_be_lent_is_known)
{
    const wsync_cuda_device_t *device = open_device(0);
    const wsync_cuda_driver_t *cu = device->driver;
    mapping_t mapping = {.device = device, .count = 1};
    char private[64];
    wsync_memory_t *memory = NULL;
    wsync_cu_ptr_t small = 0;
    wsync_error_t err = {0};
    found_t found;

    CU(cu->mem_reserve(&mapping.at, PIECE, 0, 0, 0));
    CHECK_EQ(find_at(device, mapping.at, PIECE).count, 0);
    map_piece(&mapping, 0, 0);
    CHECK_OK(wsync_cuda_enter(device, &err), err);
    CU(cu->mem_alloc(&small, 4096));
    wsync_cuda_leave(device);
    CHECK_EQ(find_at(device, (uintptr_t)private, sizeof(private)).count, 0);
    for (int i = 0; i < 2; i++) {
        found = i == 0 ? find_at(device, mapping.at, PIECE) : find_at(device, small, 4096);
        CHECK_EQ(found.count, 1);
        CHECK_EQ(found.items[0].identity, 0);
        CHECK_EQ(wsync_cuda_lend(device, found.items, 1, &memory, &err), WSYNC_ERR_INVALID);
    }
    CHECK_OK(wsync_cuda_enter(device, &err), err);
    CU(cu->mem_free(small));
    wsync_cuda_leave(device);
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

TEST(memory_of_another_gpu_is_mapped_where_that_is_reached)
{
    const wsync_cuda_device_t *device;
    wsync_memory_t *borrowed;
    wsync_memory_t *lent;
    mapping_t mapping;
    found_t found;

    choose_fake("WSYNC_FAKE_CUDA_DEVICES", "2");
    device = open_device(1);
    mapping = make_mapping(device, 1);
    found = find_at(device, mapping.at, PIECE);
    lent = lend(device, &found);
    ((unsigned char *)reach(lent->data))[8] = 9;
    borrowed = borrow(open_device(0), lent);
    CHECK_EQ(bytes_of(borrowed)[8], 9);
    wsync_memory_destroy(borrowed);
    wsync_memory_destroy(lent);
    end_mapping(&mapping);
    check_clean();
}

/* --- by IPC handle ----------------------------------------------------------------------
 */

/* The driver opens no handle in the process that has made it. */
TEST(an_allocation_is_borrowed_in_its_own_process)
{
    const wsync_cuda_device_t *device = open_device(0);
    wsync_cuda_ipc_t *allocation = NULL;
    wsync_memory_t *borrowed;
    wsync_memory_t *lent;
    wsync_error_t err = {0};
    found_t found;

    CHECK_OK(wsync_cuda_ipc_create(device, PIECE, &allocation, &err), err);
    found = find_at(device, allocation->at, 8);
    lent = lend(device, &found);
    borrowed = borrow(device, lent);
    CHECK(borrowed->data == lent->data);
    CHECK(!wsync_cuda_retire(lent));
    CHECK_OK(wsync_memory_park(borrowed, &err), err);
    CHECK(wsync_cuda_retire(lent));
    wsync_memory_destroy(borrowed);
    wsync_memory_destroy(lent);
    CHECK_EQ(fake_census().allocated, 1);
    wsync_cuda_ipc_destroy(allocation);
    check_clean();
}

static void borrow_main(int socket)
{
    const wsync_cuda_device_t *device = open_device(0);
    const int fd = hear_fd(socket);
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_borrow(&device->base, &fd, 1, &memory, &err), err);
    CHECK_EQ(memory->nbytes, PIECE);
    CHECK_EQ(bytes_of(memory)[PIECE - 1], 42);
    nudge(socket);
    await_nudge(socket);
    CHECK_OK(wsync_memory_park(memory, &err), err);
    check_clean();
    nudge(socket);
    await_nudge(socket); /* nobody opens it any more */
    wsync_memory_destroy(memory);
    check_refused(device, &fd, 1, WSYNC_ERR_CLOSED, "has been freed");
    (void)close(fd);
    nudge(socket);
}

TEST(an_allocation_is_open_until_its_borrower_lets_go)
{
    const peer_t peer = peer_start(borrow_main);
    const wsync_cuda_device_t *device = open_device(0);
    wsync_cuda_ipc_t *allocation = NULL;
    wsync_memory_t *lent;
    wsync_error_t err = {0};
    found_t found;

    CHECK_OK(wsync_cuda_ipc_create(device, PIECE, &allocation, &err), err);
    ((unsigned char *)reach((void *)(uintptr_t)allocation->at))[PIECE - 1] = 42;
    found = find_at(device, allocation->at + 100, 8);
    CHECK_EQ(found.count, 1);
    CHECK(!found.items[0].piece);
    lent = lend(device, &found);
    CHECK_EQ(lent->more_count, 0);
    say_fd(peer.socket, lent->fd);
    await_nudge(peer.socket);
    CHECK(!wsync_cuda_retire(lent));
    nudge(peer.socket);
    await_nudge(peer.socket);
    CHECK(wsync_cuda_retire(lent));
    wsync_cuda_ipc_destroy(allocation);
    nudge(peer.socket);
    await_nudge(peer.socket);
    wsync_memory_destroy(lent);
    check_clean();
    peer_end(peer);
}

/* --- each driver call fails in turn -----------------------------------------------------
 */

static wsync_status_t attempt(void *context, wsync_error_t *err)
{
    const mapping_t *mapping = context;
    const wsync_span_t span = {(void *)(uintptr_t)mapping->at, mapping->count * PIECE};
    wsync_cuda_allocation_t *items = NULL;
    wsync_memory_t *lent = NULL;
    wsync_memory_t *borrowed = NULL;
    size_t count = 0;
    wsync_status_t status = wsync_cuda_enter(mapping->device, err);

    if (status == WSYNC_OK) {
        status =
            wsync_cuda_find_allocations(mapping->device, &span, 1, &items, &count, err);
        wsync_cuda_leave(mapping->device);
    }
    if (status == WSYNC_OK) {
        status = wsync_cuda_lend(mapping->device, items, count, &lent, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_memory_borrow(&mapping->device->base, fds_of(lent),
                                     lent->more_count + 1, &borrowed, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_memory_park(borrowed, err);
    }
    wsync_memory_destroy(borrowed);
    wsync_memory_destroy(lent);
    free(items);
    return status;
}

TEST(each_call_fails_in_turn)
{
    mapping_t mapping = make_mapping(open_device(0), 2);

    CHECK(fail_in_turn(attempt, &mapping, WSYNC_CU_LAUNCH_FAILED, 0) > 12);
    CHECK(fail_in_turn(attempt, &mapping, WSYNC_CU_OUT_OF_MEMORY, 0) > 12);
    end_mapping(&mapping);
    check_clean();
}
