import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashSet;
import java.util.List;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMachineRoomNearby;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByMachineRoom;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.client.consumer.store.LocalFileOffsetStore;
import org.apache.rocketmq.client.consumer.store.ReadOffsetType;
import org.apache.rocketmq.client.impl.MQClientManager;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * What the Java client decides by itself: who reads which queue, and its offsets file.
 *
 * Lines in, lines out; fields are separated by tabs, items by commas, a queue is topic:broker:id.
 *   share strategy client queues members  -> queues
 *   write group offsets (queue=offset,…)  -> the file, in the directory of the system property
 *   read group queues                     -> offsets, -1 for none
 */
public class Shares {
    public static void main(String[] args) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        ClientConfig config = new ClientConfig();
        config.setClientIP("10.0.0.5");
        config.setInstanceName("DEFAULT");
        MQClientInstance client = MQClientManager.getInstance().getOrCreateMQClientInstance(config);
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] f = line.split("\t", -1);
            switch (f[0]) {
                case "share": {
                    List<MessageQueue> own =
                        strategy(f[1]).allocate("G", f[2], queues(f[3]), items(f[4]));
                    System.out.println(own.stream().map(Shares::text).collect(Collectors.joining(",")));
                    break;
                }
                case "write": {
                    LocalFileOffsetStore store = new LocalFileOffsetStore(client, f[1]);
                    HashSet<MessageQueue> all = new HashSet<>();
                    for (String pair : items(f[2])) {
                        MessageQueue queue = queue(pair.substring(0, pair.indexOf('=')));
                        store.updateOffset(queue, Long.parseLong(pair.substring(pair.indexOf('=') + 1)), false);
                        all.add(queue);
                    }
                    store.persistAll(all);
                    System.out.println("written " + client.getClientId());
                    break;
                }
                case "read": {
                    LocalFileOffsetStore store = new LocalFileOffsetStore(client, f[1]);
                    store.load();
                    System.out.println(queues(f[2]).stream()
                        .map(queue -> "" + store.readOffset(queue, ReadOffsetType.READ_FROM_STORE))
                        .collect(Collectors.joining(",")));
                    break;
                }
                default:
                    throw new IllegalArgumentException(line);
            }
            System.out.flush();
        }
        System.exit(0);
    }

    private static AllocateMessageQueueStrategy strategy(String text) {
        String[] parts = text.split(" ");
        switch (parts[0]) {
            case "average":
                return new AllocateMessageQueueAveragely();
            case "average_circle":
                return new AllocateMessageQueueAveragelyByCircle();
            case "machine_room": {
                AllocateMessageQueueByMachineRoom rooms = new AllocateMessageQueueByMachineRoom();
                rooms.setConsumeridcs(new HashSet<>(Arrays.asList(parts).subList(1, parts.length)));
                return rooms;
            }
            case "machine_room_nearby":
                return new AllocateMachineRoomNearby(strategy(text.substring(text.indexOf(" ") + 1)),
                    new AllocateMachineRoomNearby.MachineRoomResolver() {
                        @Override
                        public String brokerDeployIn(MessageQueue queue) {
                            return queue.getBrokerName().split("-")[0];
                        }

                        @Override
                        public String consumerDeployIn(String client) {
                            return client.split("-")[0];
                        }
                    });
            case "consistent_hash":
                return new AllocateMessageQueueConsistentHash(Integer.parseInt(parts[1]));
            default:
                throw new IllegalArgumentException(text);
        }
    }

    private static List<String> items(String text) {
        return text.isEmpty() ? new ArrayList<>() : Arrays.asList(text.split(","));
    }

    private static List<MessageQueue> queues(String text) {
        return items(text).stream().map(Shares::queue).collect(Collectors.toList());
    }

    private static MessageQueue queue(String text) {
        String[] parts = text.split(":");
        return new MessageQueue(parts[0], parts[1], Integer.parseInt(parts[2]));
    }

    private static String text(MessageQueue queue) {
        return queue.getTopic() + ":" + queue.getBrokerName() + ":" + queue.getQueueId();
    }
}
