// Preloaded into the processes whose faults are tested: counts what changes files below a folder, and at the n-th such call
// kills the process with a part of that call done, sends it a signal, or has this and every later one fail.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL, SIGNAL, FAIL };
// what a call asks for: memory on the disk, a change of a folder, or neither
enum { SPACE = 1, FOLDER = 2, OTHER = 4 };

static char root[4096];
static size_t root_length;
static int action, value, kinds;
static long at, calls;

// fsync passes: a process that is killed leaves its pages to the kernel
void faults_arm(const char *folder, long n, int what, int with, int of_kinds) {
  at = n, action = what, value = with, kinds = of_kinds, calls = 0;
  snprintf(root, sizeof root, "%s", folder);
  root_length = strlen(root);
}

long faults_calls(void) { return calls; }

static int below(const char *path) {
  return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int fd_below(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return below(path);
}

static int at_below(int dir, const char *path) {
  if (!root_length || !path) return 0;
  if (path[0] == '/') return below(path);
  if (dir != AT_FDCWD) return fd_below(dir);
  char here[4096];
  return syscall(SYS_getcwd, here, sizeof here) > 0 && below(here);
}

// 1: do it; 0: fail with errno; -1: do a part of it, then die
static int decide(int kind) {
  if (!(kind & kinds)) return 1;
  long n = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
  if (action == FAIL && n >= at) {
    errno = value;
    return 0;
  }
  if (n != at) return 1;
  if (action == KILL) return -1;
  if (action == SIGNAL) kill(getpid(), value);
  return 1;
}

// of what a write writes: so many 256ths
static size_t part(size_t n) { return n / 256 * value + n % 256 * value / 256; }

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

#define GUARD(seen, kind, cut) \
  if (root_length && (seen)) { \
    int saved = errno, doing = decide(kind); \
    if (!doing) return -1; \
    errno = saved; \
    if (doing < 0) { \
      cut; \
      die(); \
    } \
  }

ssize_t write(int fd, const void *data, size_t n) {
  GUARD(fd_below(fd), SPACE, syscall(SYS_write, fd, data, part(n)))
  return syscall(SYS_write, fd, data, n);
}

ssize_t writev(int fd, const struct iovec *parts, int n) {
  GUARD(fd_below(fd), SPACE, syscall(SYS_writev, fd, parts, (int)part(n)))
  return syscall(SYS_writev, fd, parts, n);
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) {
  GUARD(fd_below(fd), SPACE, syscall(SYS_pwrite64, fd, data, part(n), offset))
  return syscall(SYS_pwrite64, fd, data, n, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t n, off_t offset) { return pwrite(fd, data, n, offset); }

ssize_t sendfile(int out, int in, off_t *offset, size_t n) {
  GUARD(fd_below(out), SPACE, syscall(SYS_sendfile, out, in, offset, part(n)))
  return syscall(SYS_sendfile, out, in, offset, n);
}

ssize_t sendfile64(int out, int in, off_t *offset, size_t n) { return sendfile(out, in, offset, n); }

ssize_t copy_file_range(int in, off_t *in_offset, int out, off_t *out_offset, size_t n, unsigned flags) {
  GUARD(fd_below(out), SPACE, syscall(SYS_copy_file_range, in, in_offset, out, out_offset, part(n), flags))
  return syscall(SYS_copy_file_range, in, in_offset, out, out_offset, n, flags);
}

int ftruncate(int fd, off_t length) {
  GUARD(fd_below(fd), OTHER, )
  return syscall(SYS_ftruncate, fd, length);
}

int ftruncate64(int fd, off_t length) { return ftruncate(fd, length); }

int posix_fallocate(int fd, off_t offset, off_t length) {
  if (root_length && fd_below(fd)) {
    int doing = decide(SPACE);
    if (!doing) return value;
    if (doing < 0) die();
  }
  return syscall(SYS_fallocate, fd, 0, offset, length) ? errno : 0;
}

int posix_fallocate64(int fd, off_t offset, off_t length) { return posix_fallocate(fd, offset, length); }

int fsync(int fd) {
  GUARD(fd_below(fd), OTHER, )
  return root_length && fd_below(fd) ? 0 : syscall(SYS_fsync, fd);
}

int fdatasync(int fd) { return fsync(fd); }

static int changes(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC); }

int openat(int dir, const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
  va_end(rest);
  GUARD(changes(flags) && at_below(dir, path), SPACE | FOLDER, )
  return syscall(SYS_openat, dir, path, flags, mode);
}

int openat64(int dir, const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
  va_end(rest);
  return openat(dir, path, flags | O_LARGEFILE, mode);
}

int open(const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
  va_end(rest);
  return openat(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
  va_end(rest);
  return openat(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}

// std::ofstream opens so, and writes with write and writev
static int stream_may_open(const char *path, const char *mode) {
  GUARD(strpbrk(mode, "wa+") && at_below(AT_FDCWD, path), SPACE | FOLDER, )
  return 0;
}

FILE *fopen(const char *path, const char *mode) {
  static FILE *(*real)(const char *, const char *);
  if (!real) real = dlsym(RTLD_NEXT, "fopen");
  return stream_may_open(path, mode) ? NULL : real(path, mode);
}

FILE *fopen64(const char *path, const char *mode) { return fopen(path, mode); }

int mkdirat(int dir, const char *path, mode_t mode) {
  GUARD(at_below(dir, path), SPACE | FOLDER, )
  return syscall(SYS_mkdirat, dir, path, mode);
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
  GUARD(at_below(to_dir, to), FOLDER, )
  return syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
}

int renameat(int from_dir, const char *from, int to_dir, const char *to) {
  return renameat2(from_dir, from, to_dir, to, 0);
}

int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags) {
  GUARD(at_below(to_dir, to), FOLDER, )
  return syscall(SYS_linkat, from_dir, from, to_dir, to, flags);
}

int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int symlinkat(const char *from, int dir, const char *to) {
  GUARD(at_below(dir, to), FOLDER, )
  return syscall(SYS_symlinkat, from, dir, to);
}

int symlink(const char *from, const char *to) { return symlinkat(from, AT_FDCWD, to); }

int unlinkat(int dir, const char *path, int flags) {
  GUARD(at_below(dir, path), FOLDER, )
  return syscall(SYS_unlinkat, dir, path, flags);
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }

int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
