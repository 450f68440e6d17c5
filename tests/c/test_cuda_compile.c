/* SPDX-License-Identifier: Apache-2.0
 * Compiling the kernels at run time, with a stand-in for NVRTC, and the cache on disk. */
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#include "device/cuda_compile.h"
#include "harness.h"

static const char *const libraries[] = {"/nowhere/libnvrtc.so.13", WSYNC_FAKE_NVRTC};

/* Of one test: its folder goes with it. */
typedef struct fixture {
    char root[64];
    char cache[96];
    wsync_compile_spec_t spec;
    int *compiled;
    int *fails;
} fixture_t;

static void fixture_init(fixture_t *fixture)
{
    void *library = dlopen(WSYNC_FAKE_NVRTC, RTLD_NOW);

    CHECK(library != NULL);
    *fixture = (fixture_t){.root = "/tmp/wsync-compile.XXXXXX"};
    CHECK(mkdtemp(fixture->root) != NULL);
    (void)snprintf(fixture->cache, sizeof(fixture->cache), "%s/new/kernels", fixture->root);
    fixture->spec = (wsync_compile_spec_t){
        .libraries = libraries,
        .library_count = 2,
        .cache = fixture->cache,
        .capability = 90,
    };
    fixture->compiled = dlsym(library, "fake_nvrtc_compiled");
    fixture->fails = dlsym(library, "fake_nvrtc_fails");
    CHECK(fixture->compiled != NULL && fixture->fails != NULL);
}

static void fixture_fini(const fixture_t *fixture)
{
    char command[128];

    (void)snprintf(command, sizeof(command), "rm -rf %s", fixture->root);
    CHECK_EQ(system(command), 0);
}

/* Compiles or loads, and checks that what comes is what the compiler makes. */
static bool get(const fixture_t *fixture)
{
    wsync_kernel_image_t image = {0};
    wsync_error_t err;
    bool cached;

    CHECK_OK(wsync_cuda_compile(&fixture->spec, &image, &err), err);
    CHECK_EQ(image.nbytes, 4096);
    CHECK_HAS((const char *)image.data, "cubin of ");
    CHECK_HAS((const char *)image.data, " with --gpu-architecture=sm_90");
    CHECK_EQ(((const char *)image.data)[4095], '.');
    cached = image.cached;
    wsync_kernel_image_fini(&image);
    CHECK(image.data == NULL);
    return cached;
}

/* The path of the one file in the cache. */
static void cache_file(const fixture_t *fixture, char *path, size_t capacity)
{
    DIR *folder = opendir(fixture->cache);
    struct dirent *entry;
    int files = 0;

    CHECK(folder != NULL);
    while ((entry = readdir(folder)) != NULL) {
        if (entry->d_name[0] != '.') {
            (void)snprintf(path, capacity, "%s/%s", fixture->cache, entry->d_name);
            files++;
        }
    }
    (void)closedir(folder);
    CHECK_EQ(files, 1);
}

TEST(machine_code_for_a_known_device_and_ptx_for_a_newer_one)
{
    wsync_kernel_image_t image = {0};
    wsync_error_t err;
    fixture_t fixture;

    fixture_init(&fixture);
    fixture.spec.cache = NULL;
    CHECK(!get(&fixture));
    CHECK(!get(&fixture));
    CHECK_EQ(*fixture.compiled, 2);
    fixture.spec.capability = 103;
    CHECK_OK(wsync_cuda_compile(&fixture.spec, &image, &err), err);
    CHECK_HAS((const char *)image.data, "ptx of ");
    CHECK_HAS((const char *)image.data, " with --gpu-architecture=compute_100");
    wsync_kernel_image_fini(&image);
    fixture_fini(&fixture);
}

TEST(errors_say_what_is_wrong)
{
    static const char *const other[] = {"libm.so.6"};
    wsync_kernel_image_t image = {.nbytes = 77};
    wsync_error_t err;
    fixture_t fixture;

    fixture_init(&fixture);
    fixture.spec.capability = 61;
    CHECK_EQ(wsync_cuda_compile(&fixture.spec, &image, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_STR(err.message,
              "NVRTC 13.0 compiles for no device as old as compute capability 6.1");
    fixture.spec.capability = 90;
    *fixture.fails = 1;
    CHECK_EQ(wsync_cuda_compile(&fixture.spec, &image, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_EQ(err.native, 6);
    CHECK_STR(err.message,
              "the kernels do not compile: nvrtcCompileProgram: "
              "NVRTC_ERROR_COMPILATION (6): kernels.cu(7): error: planted");
    fixture.spec.libraries = other;
    fixture.spec.library_count = 1;
    CHECK_EQ(wsync_cuda_compile(&fixture.spec, &image, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_HAS(err.message, "or another library: it has no nvrtcVersion");
    CHECK_EQ(image.nbytes, 77);
    fixture_fini(&fixture);
}

/* Where the machine has an NVRTC of its own, that one compiles; else all places are named.
 */
TEST(without_nvrtc_every_place_is_named)
{
    const wsync_compile_spec_t spec = {
        .libraries = libraries, .library_count = 1, .capability = 90};
    wsync_kernel_image_t image = {0};
    wsync_error_t err;

    if (wsync_cuda_compile(&spec, &image, &err) == WSYNC_OK) {
        CHECK(image.nbytes > 0);
        wsync_kernel_image_fini(&image);
        return;
    }
    CHECK_HAS(err.message, "no NVRTC to compile the kernels with");
    CHECK_HAS(err.message, "nvidia-cuda-nvrtc): /nowhere/libnvrtc.so.13: ");
    CHECK_HAS(err.message, "; libnvrtc.so.13: ");
    CHECK_HAS(err.message, "; libnvrtc.so.11.2: ");
}

/* A driver may refuse what a compiler of a later major version makes: it comes last. */
TEST(an_nvrtc_that_the_driver_knows_comes_first)
{
    static const char *const both[] = {"/a.so.99/libnvrtc.so.13",
                                       "/nowhere/libnvrtc.so.12"};
    wsync_compile_spec_t spec = {
        .libraries = both, .library_count = 2, .capability = 90, .driver = 12080};
    wsync_kernel_image_t image = {0};
    wsync_error_t err;

    if (wsync_cuda_compile(&spec, &image, &err) == WSYNC_OK) {
        wsync_kernel_image_fini(&image);
        return; /* the machine has one of its own */
    }
    CHECK(strstr(err.message, both[1]) != NULL && strstr(err.message, both[0]) != NULL);
    CHECK(strstr(err.message, both[1]) < strstr(err.message, both[0]));
    CHECK(strstr(err.message, "; libnvrtc.so.12: ") < strstr(err.message, both[0]));
    spec.driver = 13000;
    CHECK_EQ(wsync_cuda_compile(&spec, &image, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK(strstr(err.message, both[0]) < strstr(err.message, both[1]));
}

TEST(the_next_process_loads_what_was_compiled)
{
    char path[512];
    struct stat status;
    fixture_t fixture;

    fixture_init(&fixture);
    CHECK(!get(&fixture));
    CHECK(get(&fixture));
    CHECK(get(&fixture));
    CHECK_EQ(*fixture.compiled, 1);
    cache_file(&fixture, path, sizeof(path));
    CHECK_HAS(path, "-sm_90-nvrtc13.0.bin");
    CHECK_EQ(stat(path, &status), 0);
    CHECK_EQ(status.st_mode & 0777, 0600);
    CHECK_EQ(stat(fixture.cache, &status), 0);
    CHECK_EQ(status.st_mode & 0777, 0700);
    fixture_fini(&fixture);
}

TEST(damaged_files_are_compiled_anew_and_replaced)
{
    char path[512];
    struct stat status;
    fixture_t fixture;

    fixture_init(&fixture);
    CHECK(!get(&fixture));
    cache_file(&fixture, path, sizeof(path));
    CHECK_EQ(stat(path, &status), 0);
    for (off_t at = 0; at < status.st_size; at += at < 32 ? 1 : 501) {
        const int fd = open(path, O_RDWR);
        unsigned char byte;

        CHECK_EQ(pread(fd, &byte, 1, at), 1);
        byte ^= 0x10;
        CHECK_EQ(pwrite(fd, &byte, 1, at), 1);
        (void)close(fd);
        CHECK(!get(&fixture));
        CHECK(get(&fixture));
    }
    for (off_t nbytes = 0; nbytes < status.st_size; nbytes += nbytes < 32 ? 1 : 501) {
        CHECK_EQ(truncate(path, nbytes), 0);
        CHECK(!get(&fixture));
        CHECK(get(&fixture));
    }
    CHECK_EQ(truncate(path, status.st_size + 1), 0);
    CHECK(!get(&fixture));
    cache_file(&fixture, path, sizeof(path));
    fixture_fini(&fixture);
}

TEST(files_that_others_can_write_are_not_loaded)
{
    char path[512];
    char link[128];
    fixture_t fixture;

    fixture_init(&fixture);
    CHECK(!get(&fixture));
    cache_file(&fixture, path, sizeof(path));
    CHECK_EQ(chmod(path, 0660), 0);
    CHECK(!get(&fixture));
    CHECK(get(&fixture)); /* replaced by one of our own */
    CHECK_EQ(chmod(fixture.cache, 0770), 0);
    CHECK(!get(&fixture));
    CHECK(!get(&fixture)); /* nor is anything put there */
    CHECK_EQ(chmod(fixture.cache, 0700), 0);
    CHECK(get(&fixture));
    (void)snprintf(link, sizeof(link), "%s/elsewhere", fixture.root);
    CHECK_EQ(rename(path, link), 0);
    CHECK_EQ(symlink(link, path), 0);
    CHECK(!get(&fixture));
    if (geteuid() == 0) {
        CHECK(get(&fixture));
        CHECK_EQ(chown(path, 12345, 12345), 0);
        CHECK(!get(&fixture));
    }
    fixture_fini(&fixture);
}
