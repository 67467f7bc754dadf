// File-system calls below one folder: counted, and made to fail. Preloaded by benchmarks/file_faults.py (LD_PRELOAD).
//
// All processes of a run share one `state`. The call with number `fails` gets `error`, or SIGKILL where that is 0, and
// a write is torn: half of its bytes arrive. While `full` is set, every call that takes space gets ENOSPC.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_CALLS 4096

struct call {
    char name[16], path[112];
};
struct state {
    long count, fails, error, full, num_failed;
    struct call calls[MAX_CALLS];
};

static struct state *state;
static char folder[PATH_MAX];

// From now on, in this process and those it forks.
void file_faults_begin(const char *below, struct state *shared) {
    strncpy(folder, below, sizeof folder - 1);
    state = shared;
}

static const char *path_of(int descriptor, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    buffer[length < 0 ? 0 : length] = 0;
    return buffer;
}

// 0: go on; 1: fail with errno set; 2: tear a write, then `end`.
static int fault(const char *name, const char *path, int takes_space) {
    size_t length = strlen(folder);
    if (!state || !path || strncmp(path, folder, length) || (path[length] && path[length] != '/'))
        return 0;
    long number = __sync_add_and_fetch(&state->count, 1);
    if (number < MAX_CALLS) {
        snprintf(state->calls[number].name, sizeof state->calls[number].name, "%s", name);
        snprintf(state->calls[number].path, sizeof state->calls[number].path, "%s", path + length);
    }
    if (state->full && takes_space) {
        __sync_add_and_fetch(&state->num_failed, 1);
        errno = ENOSPC;
        return 1;
    }
    if (number != state->fails)
        return 0;
    __sync_add_and_fetch(&state->num_failed, 1);
    if (!strcmp(name, "write"))
        return 2;
    if (!state->error)
        kill(getpid(), SIGKILL);
    errno = (int)state->error;
    return 1;
}

#define REAL(result, name, ...)                                                                                        \
    ({                                                                                                                 \
        static result (*real)(__VA_ARGS__);                                                                            \
        if (!real)                                                                                                     \
            real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name);                                                    \
        real;                                                                                                          \
    })
#define BY_PATH(result, failed, name, as, space, parameters, arguments, ...)                                           \
    result name parameters {                                                                                           \
        if (fault(as, path, space))                                                                                    \
            return failed;                                                                                             \
        return REAL(result, name, __VA_ARGS__) arguments;                                                              \
    }
#define BY_DESCRIPTOR(result, name, as, space, parameters, arguments, ...)                                             \
    result name parameters {                                                                                           \
        char buffer[PATH_MAX];                                                                                         \
        if (state && fault(as, path_of(descriptor, buffer), space))                                                    \
            return -1;                                                                                                 \
        return REAL(result, name, __VA_ARGS__) arguments;                                                              \
    }
#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                                        \
        va_end(more);                                                                                                  \
        if (fault("open", path, flags & O_CREAT))                                                                      \
            return -1;                                                                                                 \
        return REAL(int, name, const char *, int, ...)(path, flags, mode);                                             \
    }
#define OPENAT(name)                                                                                                   \
    int name(int at, const char *path, int flags, ...) {                                                               \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                                        \
        va_end(more);                                                                                                  \
        char buffer[PATH_MAX];                                                                                         \
        if (fault("open", *path == '/' || at < 0 ? path : path_of(at, buffer), flags & O_CREAT))                       \
            return -1;                                                                                                 \
        return REAL(int, name, int, const char *, int, ...)(at, path, flags, mode);                                    \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
BY_PATH(FILE *, NULL, fopen, "open", 1, (const char *path, const char *how), (path, how), const char *, const char *)
BY_PATH(FILE *, NULL, fopen64, "open", 1, (const char *path, const char *how), (path, how), const char *, const char *)
BY_PATH(DIR *, NULL, opendir, "opendir", 0, (const char *path), (path), const char *)
BY_PATH(int, -1, mkdir, "mkdir", 1, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
BY_PATH(int, -1, rmdir, "rmdir", 0, (const char *path), (path), const char *)
BY_PATH(int, -1, unlink, "unlink", 0, (const char *path), (path), const char *)
BY_PATH(int, -1, rename, "rename", 1, (const char *path, const char *to), (path, to), const char *, const char *)
BY_PATH(int, -1, link, "link", 1, (const char *path, const char *to), (path, to), const char *, const char *)
BY_PATH(int, -1, truncate64, "truncate", 1, (const char *path, off64_t size), (path, size), const char *, off64_t)
BY_PATH(int, -1, chmod, "chmod", 0, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
BY_PATH(int, -1, access, "access", 0, (const char *path, int mode), (path, mode), const char *, int)
BY_PATH(int, -1, stat64, "stat", 0, (const char *path, struct stat64 *to), (path, to), const char *, struct stat64 *)
BY_PATH(int, -1, lstat64, "stat", 0, (const char *path, struct stat64 *to), (path, to), const char *, struct stat64 *)
BY_DESCRIPTOR(int, fstat64, "stat", 0, (int descriptor, struct stat64 *to), (descriptor, to), int, struct stat64 *)
BY_DESCRIPTOR(int, ftruncate64, "truncate", 1, (int descriptor, off64_t size), (descriptor, size), int, off64_t)
BY_DESCRIPTOR(int, fsync, "fsync", 1, (int descriptor), (descriptor), int)
BY_DESCRIPTOR(int, fdatasync, "fsync", 1, (int descriptor), (descriptor), int)
BY_DESCRIPTOR(int, flock, "flock", 0, (int descriptor, int how), (descriptor, how), int, int)
BY_DESCRIPTOR(ssize_t, read, "read", 0, (int descriptor, void *to, size_t size), (descriptor, to, size), int, void *,
              size_t)
BY_DESCRIPTOR(ssize_t, writev, "write", 1, (int descriptor, const struct iovec *from, int count),
              (descriptor, from, count), int, const struct iovec *, int)

int fstatat64(int at, const char *path, struct stat64 *to, int flags) {
    char buffer[PATH_MAX];
    if (fault("stat", *path == '/' || at < 0 ? path : path_of(at, buffer), 0))
        return -1;
    return REAL(int, fstatat64, int, const char *, struct stat64 *, int)(at, path, to, flags);
}

int unlinkat(int at, const char *path, int flags) {
    char buffer[PATH_MAX];
    if (fault("unlink", *path == '/' || at < 0 ? path : path_of(at, buffer), 0))
        return -1;
    return REAL(int, unlinkat, int, const char *, int)(at, path, flags);
}

struct dirent64 *readdir64(DIR *entries) {
    char buffer[PATH_MAX];
    if (state && fault("readdir", path_of(dirfd(entries), buffer), 0))
        return NULL;
    return REAL(struct dirent64 *, readdir64, DIR *)(entries);
}

ssize_t write(int descriptor, const void *from, size_t size) {
    char buffer[PATH_MAX];
    ssize_t (*real)(int, const void *, size_t) = REAL(ssize_t, write, int, const void *, size_t);
    int found = state ? fault("write", path_of(descriptor, buffer), 1) : 0;
    if (found == 2) {
        if (real(descriptor, from, size / 2) < 0 || !state->error)
            kill(getpid(), SIGKILL);
        errno = (int)state->error;
    }
    return found ? -1 : real(descriptor, from, size);
}

int close(int descriptor) {
    char buffer[PATH_MAX];
    int found = state ? fault("close", path_of(descriptor, buffer), 0) : 0;
    int before = errno, done = REAL(int, close, int)(descriptor);
    if (found)
        errno = before;
    return found ? -1 : done;
}
