/* Shifts the wall clock of Python and Lance by the seconds in the file $CHAOS_CLOCK (LD_PRELOAD).
 *
 * Other libraries keep the real clock: they wait for absolute times in the kernel, which knows no
 * other clock. The monotonic clock stays as it is, as when the clock of a machine is set.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int is_shifted(const void *caller) {
    Dl_info library;
    if (!dladdr(caller, &library) || !library.dli_fname) return 0;
    const char *slash = strrchr(library.dli_fname, '/');
    const char *name = slash ? slash + 1 : library.dli_fname;
    return !strncmp(name, "python", 6) || !strncmp(name, "libpython", 9) || !strncmp(name, "lance", 5);
}

static long offset(void) {
    char text[32];
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    text[size > 0 ? size : 0] = 0;
    return strtol(text, NULL, 10);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && clock == CLOCK_REALTIME && is_shifted(__builtin_return_address(0)))
        now->tv_sec += offset();
    return result;
}
