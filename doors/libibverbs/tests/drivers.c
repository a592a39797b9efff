/* Asks the libraries of drivers whether a device is theirs, as libfabric and UCX do. */
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdio.h>

static void *function(const char *library, const char *name)
{
	void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	return handle ? dlsym(handle, name) : NULL;
}

int main(void)
{
	bool (*is_mlx5)(struct ibv_device *) = function("libmlx5.so.1", "mlx5dv_is_supported");
	struct ibv_context *(*open_mlx5)(struct ibv_device *, void *) = function("libmlx5.so.1", "mlx5dv_open_device");
	int (*query_mlx5)(struct ibv_context *, void *) = function("libmlx5.so.1", "mlx5dv_query_device");
	int (*query_efa)(struct ibv_context *, void *, uint32_t) = function("libefa.so.1", "efadv_query_device");
	if (!is_mlx5 || !open_mlx5 || !query_mlx5 || !query_efa) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	for (int i = 0; list && i < count; i++) {
		static char attr[4096];
		struct ibv_context *context = ibv_open_device(list[i]);
		bool nobodys = context && !is_mlx5(list[i]) && !open_mlx5(list[i], attr) &&
			       query_mlx5(context, attr) == EOPNOTSUPP &&
			       query_efa(context, attr, 64) == EOPNOTSUPP;
		printf("%s: %s\n", ibv_get_device_name(list[i]), nobodys ? "nobody's" : "somebody's");
		if (context)
			ibv_close_device(context);
	}
	ibv_free_device_list(list);
	return 0;
}
